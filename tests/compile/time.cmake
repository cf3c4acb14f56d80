# SOURCE compiles with -O2 in less than MILLISECONDS of processor time, or, where the machine is slow or busy, in less
# than what a file takes that calls no operator, as many times as MILLISECONDS are to the 900 which that file takes on
# the machine the limits were set for. Up to five tries.
include(${CMAKE_CURRENT_LIST_DIR}/compiler.cmake)
find_program(BASH bash REQUIRED)

function(time_to_compile milliseconds source)
  get_filename_component(name ${source} NAME_WE)
  execute_process(
    COMMAND ${BASH} -c "TIMEFORMAT='took %3U %3S'; time \"$@\"" bash
      ${COMPILER} ${compiler_flags} -O2 -c ${source} -o ${WORK}/compile_time_${name}_of_${NAME}.o
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0 OR NOT output MATCHES "took ([0-9]+)[.,]([0-9]+) ([0-9]+)[.,]([0-9]+)")
    message(FATAL_ERROR "${output}")
  endif()
  # 1000 + ...: a leading zero would make an octal number
  math(EXPR took "1000 * ${CMAKE_MATCH_1} + 1${CMAKE_MATCH_2} - 1000 + 1000 * ${CMAKE_MATCH_3} + 1${CMAKE_MATCH_4} - 1000")
  set(${milliseconds} ${took} PARENT_SCOPE)
endfunction()

get_filename_component(NAME ${SOURCE} NAME_WE)
foreach(try 1 2 3 4 5)
  set(allowed ${MILLISECONDS})
  time_to_compile(took ${SOURCE})
  if(NOT took LESS allowed)
    time_to_compile(yardstick ${CMAKE_CURRENT_LIST_DIR}/no_operator.cpp)
    math(EXPR of_this_machine "${MILLISECONDS} * ${yardstick} / 900")
    if(allowed LESS of_this_machine)
      set(allowed ${of_this_machine})
    endif()
  endif()
  message("compiled in ${took} ms of processor time; allowed are ${allowed}")
  if(took LESS allowed)
    return()
  endif()
endforeach()
message(FATAL_ERROR "too slow to compile")
