# SOURCE, a file of the benchmark or of an example, compiles, with many warnings as errors.
include(${CMAKE_CURRENT_LIST_DIR}/compiler.cmake)
set(definitions -DATTN_BENCH_ELEMENT=float -DATTN_BENCH_TYPE=of_float)  # as bench/CMakeLists.txt gives them
list(APPEND definitions "-DATTN_DISPATCH_LEVEL=\"\"")  # and attn_dispatch
foreach(text DATA CACHE_TYPES COMPILER SECONDS)
  list(APPEND definitions "-DATTN_BENCH_${text}=\"\"")
endforeach()
compile(result output ${begin_precompiled} -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Werror ${definitions} ${SOURCE})
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${SOURCE} does not compile:\n${output}")
endif()
