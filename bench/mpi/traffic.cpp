// MPI's profiling interface: a program may define MPI's functions itself, and call the real ones as PMPI.
#include "traffic.hpp"

#include <mpi.h>

namespace bench {
namespace {

traffic sent;

std::size_t bytes_of(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return static_cast<std::size_t>(count) * static_cast<std::size_t>(size);
}
void message(int count, MPI_Datatype type) { ++sent.messages, sent.bytes += bytes_of(count, type); }
void collective(int count, MPI_Datatype type) { sent.collective_bytes += bytes_of(count, type); }

}  // namespace

traffic traffic_so_far() { return sent; }

}  // namespace bench

int MPI_Send(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
  bench::message(count, type);
  return PMPI_Send(data, count, type, to, tag, comm);
}
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  bench::message(count, type);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
int MPI_Sendrecv(const void* data, int count, MPI_Datatype type, int to, int tag, void* received, int most,
                 MPI_Datatype received_type, int from, int received_tag, MPI_Comm comm, MPI_Status* status) {
  bench::message(count, type);
  return PMPI_Sendrecv(data, count, type, to, tag, received, most, received_type, from, received_tag, comm, status);
}
int MPI_Allgather(const void* data, int count, MPI_Datatype type, void* received, int each, MPI_Datatype received_type,
                  MPI_Comm comm) {
  bench::collective(count, type);
  return PMPI_Allgather(data, count, type, received, each, received_type, comm);
}
int MPI_Allreduce(const void* data, void* result, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  bench::collective(count, type);
  return PMPI_Allreduce(data, result, count, type, op, comm);
}
int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  bench::collective(count, type);
  return PMPI_Bcast(data, count, type, root, comm);
}
