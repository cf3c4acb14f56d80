# Tests of the house as a whole, run by small CMake scripts that call the compiler or CMake itself.
set(compiler_arguments -DCOMPILER=${CMAKE_CXX_COMPILER} -DINCLUDE=${PROJECT_SOURCE_DIR}/include
  "-DSYSTEM_INCLUDE=$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>")

# Every public header compiles alone, twice included, without a warning.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/include/*.hpp)
foreach(header ${headers})
  add_test(NAME ${ATTN_TESTS_PREFIX}header.${header}
    COMMAND ${CMAKE_COMMAND} ${compiler_arguments} -DHEADER=${header}
      -DWORK=${CMAKE_CURRENT_BINARY_DIR}/headers -P ${CMAKE_CURRENT_SOURCE_DIR}/compile/header.cmake)
endforeach()

# What must not compile does not, and says why.
file(GLOB refused CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/compile ${CMAKE_CURRENT_SOURCE_DIR}/compile/refused_*.cpp)
foreach(source ${refused})
  string(REGEX REPLACE "refused_(.*).cpp" "\\1" name ${source})
  add_test(NAME ${ATTN_TESTS_PREFIX}does_not_compile.${name}
    COMMAND ${CMAKE_COMMAND} ${compiler_arguments} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/compile/${source}
      -P ${CMAKE_CURRENT_SOURCE_DIR}/compile/refused.cmake)
endforeach()

# Two translation units may include everything.
add_executable(attn_test_two_units compile/two_units_main.cpp compile/two_units_other.cpp)
target_link_libraries(attn_test_two_units PRIVATE attn_test_support)
add_test(NAME ${ATTN_TESTS_PREFIX}house.two_units COMMAND attn_test_two_units)

# One operator, included and called, compiles within the budget.
if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.23 AND NOT ATTN_SANITIZE)
  file(GLOB ones CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/compile ${CMAKE_CURRENT_SOURCE_DIR}/compile/one_*.cpp)
  foreach(source ${ones})
    string(REGEX REPLACE "one_(.*).cpp" "\\1" operator ${source})
    add_test(NAME ${ATTN_TESTS_PREFIX}compile_time.${operator}
      COMMAND ${CMAKE_COMMAND} ${compiler_arguments} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/compile/${source}
        -DWORK=${CMAKE_CURRENT_BINARY_DIR} -DSECONDS=4 -P ${CMAKE_CURRENT_SOURCE_DIR}/compile/time.cmake)
    set_tests_properties(${ATTN_TESTS_PREFIX}compile_time.${operator} PROPERTIES RUN_SERIAL ON)
  endforeach()
endif()

# The C++ blocks of README.md compile.
find_package(Python3 COMPONENTS Interpreter QUIET)
if(Python3_FOUND)
  add_test(NAME ${ATTN_TESTS_PREFIX}house.readme
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/readme.py ${CMAKE_CXX_COMPILER}
      ${PROJECT_SOURCE_DIR}/README.md ${CMAKE_CURRENT_BINARY_DIR}/readme -I ${PROJECT_SOURCE_DIR}/include
      -isystem "$<JOIN:$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>,;-isystem;>"
    COMMAND_EXPAND_LISTS)
endif()

# An outside project uses the library: installed and found, as a subdirectory, and fetched.
foreach(from package subdirectory fetch)
  add_test(NAME ${ATTN_TESTS_PREFIX}installed.${from}
    COMMAND ${CMAKE_COMMAND} -DFROM=${from} -DSOURCE=${PROJECT_SOURCE_DIR} -DBUILD=${PROJECT_BINARY_DIR}
      -DWORK=${CMAKE_CURRENT_BINARY_DIR}/installed_${from} -DCOMPILER=${CMAKE_CXX_COMPILER} "-DEigen3_DIR=${Eigen3_DIR}"
      "-DEIGEN_INCLUDE_DIR=${ATTN_EIGEN_INCLUDE_DIR}" -P ${CMAKE_CURRENT_SOURCE_DIR}/installed/try.cmake)
endforeach()
