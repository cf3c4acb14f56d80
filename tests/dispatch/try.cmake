# Builds and runs the project beside this file, and asks for what cannot be.
include(${CMAKE_CURRENT_LIST_DIR}/../installed/run.cmake)

file(REMOVE_RECURSE ${WORK})
set(configure ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -DATTN_SOURCE=${SOURCE} -DATTN_MPI=OFF
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release ${eigen})
set(levels ${PYTHON} ${CMAKE_CURRENT_LIST_DIR}/run.py)

# says(regex command...): it fails, with this sentence.
function(says regex)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " text "${output}")
  string(REGEX MATCHALL "attn_dispatch: expected" sentences "${text}")
  list(LENGTH sentences count)
  if(result EQUAL 0 OR NOT text MATCHES "attn_dispatch: expected ${regex}" OR NOT count EQUAL 1)
    message(FATAL_ERROR "expected one sentence, ${regex}; found\n${output}")
  endif()
endfunction()

foreach(case_and_regex "level|levels that [A-Za-z]+ [0-9.]+ knows as -march=LEVEL\; found x86-64-v9"
    "source|a source\; found no file missing.cpp"
    "target|a program of this folder, or a static or shared library or module\; found none"
    "no_levels|TARGET SOURCE LEVELS LEVEL...\; found bad\;kernels.cpp\;x86-64"
    "compiler|GCC or Clang for Linux on x86-64 or AArch64\; found MSVC for Linux on x86_64"
    "objcopy|objcopy and objdump\; found none" "fast|bad to link attn::attn\; found attn::fast")
  string(REGEX REPLACE "[|].*" "" case "${case_and_regex}")
  string(REGEX REPLACE ".*[|]" "" regex "${case_and_regex}")
  says("${regex}" ${configure} -B ${WORK}/bad -DCASE=${case})
endforeach()

run(${configure} -B ${WORK}/build)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${levels} levels ${WORK}/build/levels "${QEMU}" x86-64 x86-64-v3)
run(${levels} symbols ${OBJDUMP} ${WORK}/build/liblevels_kernels.so)
says("functions alone in variable.cpp.*found _ZN13of_each_level8variableE" ${CMAKE_COMMAND} --build ${WORK}/build --target variable)
says("functions of plain types in eigen_type.cpp.*in crosses.*Eigen::Matrix<float>"
  ${CMAKE_COMMAND} --build ${WORK}/build --target eigen_type)
says("the same functions at each level of other_functions.cpp.*found \"_Z7crosses" ${CMAKE_COMMAND} --build ${WORK}/build
  --target other_functions)
if(QEMU)
  run(${CMAKE_COMMAND} --build ${WORK}/build --target no_old)
  says("a processor that has the instructions of one of x86-64-v3\; found one that lacks them"
    ${QEMU} -cpu qemu64 ${WORK}/build/no_old)
endif()

# The search for shared functions finds those of levels whose symbols are not made local.
file(WRITE ${WORK}/objcopy "#!/bin/sh
for argument; do shift; case $argument in --keep-global*|--remove-section*) ;; *) set -- \"$@\" \"$argument\" ;; esac; done
exec ${OBJCOPY} \"$@\"\n")
file(CHMOD ${WORK}/objcopy PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
run(${configure} -B ${WORK}/shared -DCMAKE_OBJCOPY=${WORK}/objcopy)
run(${CMAKE_COMMAND} --build ${WORK}/shared --target levels_kernels)
execute_process(COMMAND ${levels} symbols ${OBJDUMP} ${WORK}/shared/liblevels_kernels.so RESULT_VARIABLE result
  OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0 OR NOT output MATCHES "[0-9]+ functions of AVX are shared")
  message(FATAL_ERROR "expected shared functions of AVX where no symbol is local; found\n${output}")
endif()
message("without local symbols: ${output}")
