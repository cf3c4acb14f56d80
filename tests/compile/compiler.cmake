# compile(result output arguments...): runs the compiler as a user of the library would.
set(compiler_flags -std=c++20 -I${INCLUDE})
foreach(folder ${SYSTEM_INCLUDE} ${MORE_INCLUDE})
  list(APPEND compiler_flags -isystem ${folder})
endforeach()

function(compile result output)
  execute_process(COMMAND ${COMPILER} ${compiler_flags} ${ARGN}
    RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  set(${result} ${code} PARENT_SCOPE)
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

# What makes the compiler begin with the header that precompile.cmake has compiled; nothing if PRECOMPILED is empty.
set(begin_precompiled)
if(PRECOMPILED AND COMPILER_ID MATCHES "Clang")
  set(begin_precompiled -include-pch ${PRECOMPILED}.pch)
elseif(PRECOMPILED)
  set(begin_precompiled -include ${PRECOMPILED})
endif()
