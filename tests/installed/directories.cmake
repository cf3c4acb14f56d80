# Installs where the folders have other names, and an absolute path; finds the package from there, by a project of C too.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${WORK})
set(prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/attn -DATTN_BUILD_TESTS=OFF -DATTN_BUILD_BENCH=OFF -DATTN_BUILD_EXAMPLES=OFF
  -DATTN_MPI=OFF -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_INSTALL_PREFIX=${prefix} -DCMAKE_INSTALL_INCLUDEDIR=headers/here
  -DCMAKE_INSTALL_DATADIR=${prefix}/data ${eigen})
run(${CMAKE_COMMAND} --install ${WORK}/attn)
if(NOT EXISTS ${prefix}/headers/here/attn/attn.hpp OR EXISTS ${prefix}/include)
  message(FATAL_ERROR "the headers are not in CMAKE_INSTALL_INCLUDEDIR")
endif()

find_program(PKG_CONFIG NAMES pkg-config pkgconf)
set(ENV{PKG_CONFIG_PATH} "${prefix}/data/pkgconfig:$ENV{PKG_CONFIG_PATH}")
if(PKG_CONFIG)
  execute_process(COMMAND ${PKG_CONFIG} --variable=includedir attn OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT found STREQUAL "${prefix}/headers/here")
    message(FATAL_ERROR "attn.pc: expected headers in ${prefix}/headers/here; found ${found}")
  endif()
endif()

function(outside language text)
  file(WRITE ${WORK}/${language}/CMakeLists.txt "cmake_minimum_required(VERSION 3.20)\nproject(outside LANGUAGES ${language})\n${text}")
  run(${CMAKE_COMMAND} -S ${WORK}/${language} -B ${WORK}/${language}/build -DCMAKE_CXX_COMPILER=${COMPILER} ${eigen}
    -Dattn_DIR=${prefix}/data/cmake/attn)
  set(output "${output}" PARENT_SCOPE)
endfunction()
outside(C "find_package(attn QUIET)\nmessage(STATUS \"found: \${attn_FOUND}, \${attn_NOT_FOUND_MESSAGE}\")\n")
if(NOT output MATCHES "found: (0|FALSE), attn is a library of C\\+\\+")
  message(FATAL_ERROR "a project of C finds attn, or no sentence says why it does not")
endif()
outside(CXX "find_package(attn REQUIRED)\nget_target_property(found attn::attn INTERFACE_INCLUDE_DIRECTORIES)\nmessage(STATUS \"found: \${found}\")\n")
if(NOT output MATCHES "found: ${prefix}/headers/here")
  message(FATAL_ERROR "the package does not find its headers")
endif()
