# Runs what is behind --. With FAILS_WITH it must fail and print what that regular expression matches.
#
# Open MPI's processes wait 2 seconds for mpiexec to take note of their end. Where a busy machine keeps it longer, it
# calls an end that was in order improper: these runs, and no others, are repeated. A program that does leave without
# MPI_Finalize does so every time.
set(attempts 3)
foreach(n RANGE 1 ${CMAKE_ARGC})
  if(found)
    list(APPEND command ${CMAKE_ARGV${n}})
  elseif("${CMAKE_ARGV${n}}" STREQUAL "--")
    set(found TRUE)
  endif()
endforeach()
foreach(attempt RANGE 1 ${attempts})
  execute_process(COMMAND ${command} TIMEOUT 110 RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(FAILS_WITH OR result EQUAL 0 OR output MATCHES "process [0-9]+ of [0-9]+:" OR
      NOT output MATCHES "exiting improperly")
    break()
  endif()
  message("Attempt ${attempt} of ${attempts} ended improperly.")
endforeach()
if(NOT FAILS_WITH)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "mpiexec: ${result}")
  endif()
elseif(result EQUAL 0 OR result MATCHES "timeout")
  message(FATAL_ERROR "expected the job to fail by itself; found: ${result}")
elseif(NOT output MATCHES "${FAILS_WITH}")
  message(FATAL_ERROR "expected the output to match: ${FAILS_WITH}")
endif()
