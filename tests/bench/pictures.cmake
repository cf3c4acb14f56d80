# The pictures of attn_bench, drawn from made-up results: what their axes, titles and remarks say. Needs no benchmark.
find_program(ATTN_PYTHON NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH)  # as bench/run: the one with matplotlib
if(ATTN_PYTHON)
  add_test(NAME ${prefix}bench.pictures COMMAND ${ATTN_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/pictures.py)
else()
  add_test(NAME ${prefix}bench.pictures COMMAND ${CMAKE_COMMAND} -E echo "skipped: /usr/bin/python3 is missing")
endif()
set_tests_properties(${prefix}bench.pictures PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
