# attn_bench, without running it: in which order it runs what it has planned.
add_executable(attn_test_bench bench/order.cpp)
target_link_libraries(attn_test_bench PRIVATE ${catch})
target_include_directories(attn_test_bench PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/bench)
target_compile_features(attn_test_bench PRIVATE cxx_std_20)
target_compile_options(attn_test_bench PRIVATE -O0)
add_test(NAME ${prefix}bench.order COMMAND attn_test_bench)
set_tests_properties(${prefix}bench.order PROPERTIES LABELS attn_test_bench)

# Its pictures, drawn from made-up results: what their axes, titles and remarks say.
find_program(ATTN_PYTHON NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH)  # as bench/run: the one with matplotlib
if(ATTN_PYTHON)
  add_test(NAME ${prefix}bench.pictures COMMAND ${ATTN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/pictures.py)
  # And bench/run --peers: what it says, and its table, from made-up programs.
  add_test(NAME ${prefix}bench.peers COMMAND ${ATTN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/peers.py)
  # And what bench/run --help says, at once; .ci/run tries the command line of attn_bench itself.
  add_test(NAME ${prefix}bench.command COMMAND ${ATTN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/command.py)
else()
  add_test(NAME ${prefix}bench.command COMMAND ${CMAKE_COMMAND} -E echo "skipped: /usr/bin/python3 is missing")
  add_test(NAME ${prefix}bench.peers COMMAND ${CMAKE_COMMAND} -E echo "skipped: /usr/bin/python3 is missing")
  add_test(NAME ${prefix}bench.pictures COMMAND ${CMAKE_COMMAND} -E echo "skipped: /usr/bin/python3 is missing")
endif()
set_tests_properties(${prefix}bench.command ${prefix}bench.pictures ${prefix}bench.peers PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
