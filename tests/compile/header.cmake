# HEADER compiles alone, but for Eigen, which is PRECOMPILED, and included twice, with many warnings as errors.
include(${CMAKE_CURRENT_LIST_DIR}/compiler.cmake)
string(MAKE_C_IDENTIFIER ${HEADER} name)
set(source ${WORK}/${name}.cpp)
file(WRITE ${source} "#include <${HEADER}>\n#include <${HEADER}>\n")
compile(result output ${begin_precompiled} -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror ${source})
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${HEADER} does not compile alone:\n${output}")
endif()
