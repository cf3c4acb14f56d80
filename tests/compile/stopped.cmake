# Every public header, or each of HEADERS, compiled with FLAG, stops at once with the sentence SAYS and tells of no other
# error.
include(${CMAKE_CURRENT_LIST_DIR}/compiler.cmake)
file(GLOB_RECURSE headers RELATIVE ${INCLUDE} ${INCLUDE}/*.hpp)
if(COMPILER_ID MATCHES "Clang")  # it is silent after a missing include, but reads on
  set(headers attn/attn.hpp)
elseif(HEADERS)
  set(headers ${HEADERS})
endif()
foreach(header ${headers})
  set(source ${WORK}.cpp)
  file(WRITE ${source} "#include <${header}>\n")
  compile(result output ${FLAG} -fsyntax-only ${source})
  string(FIND "${output}" "${SAYS}" at)
  string(REGEX MATCHALL "error:" errors "${output}")
  list(LENGTH errors count)
  if(result EQUAL 0 OR at EQUAL -1 OR count GREATER 2)  # the sentence, and the include that stops the compiler
    message(FATAL_ERROR "${header} with ${FLAG}: expected the one error \"${SAYS}\"; found ${count}:\n${output}")
  endif()
endforeach()
