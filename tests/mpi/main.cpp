// The main function of tests run by several processes: mpiexec -n 3 attn_test_mpi "[full_softmax]".
//
// Every process runs the same test cases, and process 0 alone prints. What fails on one process, be it an assertion, an
// exception or the time, is printed by that process and ends the job, for the others may wait for it.
#define CATCH_CONFIG_RUNNER
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#include <catch2/catch_test_case_info.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
using listener_base = Catch::EventListenerBase;
#else
#include <catch2/catch.hpp>
using listener_base = Catch::TestEventListenerBase;
#endif

#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

namespace {

int rank = 0, processes = 1;
std::string late = "no end in time\n";  // what is printed when it is too late to put texts together

std::string place() { return "process " + std::to_string(rank) + " of " + std::to_string(processes); }

[[noreturn]] void end_job(const std::string& why) {
  std::fprintf(stderr, "%s: %s\n", place().c_str(), why.c_str());
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::_Exit(1);
}

// A process that leaves without MPI_Finalize ends the job, too.
void time_is_up(int) {
  if (write(STDERR_FILENO, late.data(), late.size()) < 0) _exit(2);
  _exit(1);
}

/// The first failure ends the job.
class failure_listener final : public listener_base {
 public:
  using listener_base::listener_base;

  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    test_ = test.name;
    late = place() + ": no end in time: " + test_ + "\n";
  }

  using result_type = decltype(std::declval<listener_base&>().assertionEnded(std::declval<Catch::AssertionStats>()));
  result_type assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    if (!result.isOk()) {
      if (result.getResultType() == Catch::ResultWas::FatalErrorCondition &&
          result.getMessage().starts_with("SIGTERM"))  // another process has ended the job
        _exit(1);
      std::string text = "failed: " + test_;
      text += "\n" + std::string(result.getSourceInfo().file) + ":" + std::to_string(result.getSourceInfo().line);
      if (result.hasExpression()) text += "\n  " + result.getExpressionInMacro();
      if (result.hasExpandedExpression()) text += "\n  " + result.getExpandedExpression();
      if (result.hasMessage()) text += "\n  " + std::string(result.getMessage());
      for (const Catch::MessageInfo& info : stats.infoMessages)
        if (info.message != result.getMessage()) text += "\n  " + info.message;
      end_job(text);
    }
    return result_type(true);
  }

 private:
  std::string test_;
};
CATCH_REGISTER_LISTENER(failure_listener)

int run(int argc, char** argv) {
  Catch::Session session;
  if (rank != 0 && !std::freopen("/dev/null", "w", stdout)) end_job("cannot open /dev/null");
  int failed = session.applyCommandLine(argc, argv);
  if (failed == 0) failed = session.run();
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  if (provided < MPI_THREAD_FUNNELED) end_job("expected MPI_THREAD_FUNNELED; MPI provides less");

  // An mpiexec of another MPI than the program's starts programs that know nothing of each other.
  if (const char* wanted = std::getenv("ATTN_TEST_PROCESSES"); wanted && std::atoi(wanted) != processes)
    end_job(std::string("expected ") + wanted + " processes; mpiexec and the program are of different MPIs");

  const char* seconds = std::getenv("ATTN_TEST_SECONDS");
  std::signal(SIGALRM, time_is_up);
  alarm(seconds ? static_cast<unsigned>(std::atoi(seconds)) : 100);
  try {
    int failed = run(argc, argv);
    MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return failed;
  } catch (const std::exception& error) {
    end_job(error.what());
  }
}
