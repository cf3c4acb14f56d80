# Tests of the library as a whole, run by small CMake scripts that call the compiler or CMake itself.
set(prefix ${ATTN_TESTS_PREFIX})
set(work ${CMAKE_CURRENT_BINARY_DIR}/house)
file(MAKE_DIRECTORY ${work})
set(compiler_arguments -DCOMPILER=${CMAKE_CXX_COMPILER} -DCOMPILER_ID=${CMAKE_CXX_COMPILER_ID}
  -DINCLUDE=${PROJECT_SOURCE_DIR}/include
  "-DSYSTEM_INCLUDE=$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>")

# attn_script_test(name script arguments...): a test that runs compile/SCRIPT.cmake.
function(attn_script_test name script)
  add_test(NAME ${prefix}${name} COMMAND ${CMAKE_COMMAND} ${compiler_arguments} ${ARGN}
    -P ${CMAKE_CURRENT_SOURCE_DIR}/compile/${script}.cmake)
endfunction()

# Every header compiles alone but for Eigen, which is precompiled, twice included, without a warning: one by one where
# headers are what is tested (by Clang, in a third of GCC's time), attn.hpp alone elsewhere.
set(precompiled -DPRECOMPILED=${work}/eigen.hpp)
attn_script_test(header.precompile precompile -DHEADER=Eigen/Core ${precompiled})
set_tests_properties(${prefix}header.precompile PROPERTIES FIXTURES_SETUP ${prefix}eigen COST 100)
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/include/*.hpp)
if(NOT ATTN_TESTS_HOUSE STREQUAL "HEADERS")
  set(headers attn/attn.hpp)
endif()
foreach(header ${headers})
  set(with_mpi)
  if(header MATCHES "^attn/mpi/")
    if(NOT TARGET attn::mpi)
      add_test(NAME ${prefix}header.${header} COMMAND ${CMAKE_COMMAND} -E echo "MPI is not installed")
      set_tests_properties(${prefix}header.${header} PROPERTIES SKIP_REGULAR_EXPRESSION "MPI is not installed")
      continue()
    endif()
    set(with_mpi "-DMORE_INCLUDE=$<TARGET_PROPERTY:MPI::MPI_CXX,INTERFACE_INCLUDE_DIRECTORIES>")
  endif()
  attn_script_test(header.${header} header -DHEADER=${header} -DWORK=${work} ${precompiled} ${with_mpi})
  set_tests_properties(${prefix}header.${header} PROPERTIES FIXTURES_REQUIRED ${prefix}eigen)
endforeach()

# Compiled for C++17 or with -ffast-math, every header stops with one sentence.
attn_script_test(guard.cpp17 stopped -DFLAG=-std=c++17 "-DSAYS=attn needs C++20" -DWORK=${work}/cpp17)
attn_script_test(guard.fast_math stopped -DFLAG=-ffast-math "-DSAYS=attn must not be compiled with -ffast-math"
  -DWORK=${work}/fast_math)
set_tests_properties(${prefix}guard.cpp17 ${prefix}guard.fast_math PROPERTIES COST 10)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # Clang has no macro that says so
  attn_script_test(guard.associative_math stopped -DFLAG=-funsafe-math-optimizations -DHEADERS=attn/attn.hpp
    "-DSAYS=attn must not be compiled with -ffast-math or -fassociative-math" -DWORK=${work}/associative_math)
endif()

# What must not compile does not, and says why.
attn_script_test(does_not_compile.precompile precompile -DHEADER=attn/attn.hpp -DPRECOMPILED=${work}/attn.hpp)
set_tests_properties(${prefix}does_not_compile.precompile PROPERTIES FIXTURES_SETUP ${prefix}attn COST 100)
file(GLOB refused CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/compile ${CMAKE_CURRENT_SOURCE_DIR}/compile/refused_*.cpp)
foreach(source ${refused})
  string(REGEX REPLACE "refused_(.*).cpp" "\\1" name ${source})
  set(begin attn)
  if(name MATCHES "^without_")  # a header that attn.hpp includes
    set(begin eigen)
  endif()
  attn_script_test(does_not_compile.${name} refused -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/compile/${source}
    -DPRECOMPILED=${work}/${begin}.hpp)
  set_tests_properties(${prefix}does_not_compile.${name} PROPERTIES FIXTURES_REQUIRED ${prefix}${begin})
endforeach()

attn_script_test(house.umbrella umbrella)

# Files of one program may be compiled for different instructions, whose functions have names of their own. The sets
# below differ by one macro that headers test; what is named differently is compiled for five of them.
set(isa_units plain native)
set(isa_flags_plain "")
set(isa_flags_native $<TARGET_PROPERTY:attn::fast,INTERFACE_COMPILE_OPTIONS>)
set(isa_sets)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND
    NOT "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_RELEASE}" MATCHES "-m(arch|avx)")
  list(APPEND isa_units avx2)
  set(isa_flags_avx2 -mavx2 -mfma)
  set(isa_sets -march=haswell "-march=haswell -mno-f16c" "-march=haswell -DEIGEN_DONT_VECTORIZE"
    -march=skylake-avx512 -march=cascadelake)
endif()
list(JOIN isa_sets "\\;" isa_sets)  # one argument
attn_script_test(house.isa_names isa_names -DWORK=${work}
  "-DFLAGS=${isa_sets}\;-march=nehalem\;-mavx\;-march=haswell -mno-bmi2\;-march=cooperlake\;-march=sapphirerapids\;-DEIGEN_DONT_VECTORIZE\;-DATTN_BF16_MODEL\;-DATTN_AMX_MODEL")
add_executable(attn_test_isa compile/isa_main.cpp)
target_compile_features(attn_test_isa PRIVATE cxx_std_20)
foreach(unit ${isa_units})
  add_library(attn_test_isa_${unit} OBJECT compile/isa_unit.cpp)
  target_link_libraries(attn_test_isa_${unit} PRIVATE attn::attn)
  target_compile_options(attn_test_isa_${unit} PRIVATE ${isa_flags_${unit}} -O1)
  if(ATTN_SANITIZE)  # which has nothing to find here that it does not find in the laws, and takes four times as long
    target_compile_options(attn_test_isa_${unit} PRIVATE -fno-sanitize=all)
  endif()
  target_compile_definitions(attn_test_isa_${unit} PRIVATE ATTN_TEST_UNIT=${unit}_unit)
  target_sources(attn_test_isa PRIVATE $<TARGET_OBJECTS:attn_test_isa_${unit}>)
endforeach()
target_link_libraries(attn_test_isa PRIVATE Threads::Threads)
add_test(NAME ${prefix}guard.isa COMMAND attn_test_isa)
set_tests_properties(${prefix}guard.isa PROPERTIES LABELS attn_test_isa)
if(isa_flags_avx2)
  target_compile_definitions(attn_test_isa PRIVATE ATTN_TEST_AVX2)
  if(CMAKE_NM)
    attn_script_test(house.isa_symbols isa_symbols -DNM=${CMAKE_NM} -DWORK=${work} "-DFLAGS=${isa_sets}"
      -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/compile/isa_symbols.cpp
      "-DOBJECTS=$<TARGET_OBJECTS:attn_test_isa_plain>\;$<TARGET_OBJECTS:attn_test_isa_avx2>")
    set_tests_properties(${prefix}house.isa_symbols PROPERTIES LABELS attn_test_isa COST 20)
  endif()
endif()

# A file compiled for several levels of processors (attn_dispatch).
find_package(Python3 COMPONENTS Interpreter QUIET)
find_program(ATTN_QEMU_X86_64 NAMES qemu-x86_64 qemu-x86_64-static DOC "An emulator of processors, for tests")
if(Python3_FOUND AND CMAKE_OBJCOPY AND CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  add_test(NAME ${prefix}house.dispatch COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DWORK=${work}/dispatch
    -DCOMPILER=${CMAKE_CXX_COMPILER} "-DEigen3_DIR=${Eigen3_DIR}" "-DEIGEN_INCLUDE_DIR=${ATTN_EIGEN_INCLUDE_DIR}"
    -DPYTHON=${Python3_EXECUTABLE} -DOBJCOPY=${CMAKE_OBJCOPY} -DOBJDUMP=${CMAKE_OBJDUMP}
    "-DQEMU=$<$<BOOL:${ATTN_QEMU_X86_64}>:${ATTN_QEMU_X86_64}>" -P ${CMAKE_CURRENT_SOURCE_DIR}/dispatch/try.cmake)
  set_tests_properties(${prefix}house.dispatch PROPERTIES COST 20)
endif()

if(ATTN_TESTS_HOUSE STREQUAL "HEADERS")
  # Benchmark and examples, which GCC alone compiles otherwise: a minute on one core.
  find_path(ATTN_BENCHMARK_INCLUDE_DIR benchmark/benchmark.h DOC "Folder that holds benchmark/benchmark.h")
  find_path(ATTN_PYBIND11_INCLUDE_DIR pybind11/pybind11.h DOC "Folder that holds pybind11/pybind11.h")
  find_package(Python3 COMPONENTS Development.Module QUIET)
  file(GLOB sources CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/bench/*.cpp
    ${PROJECT_SOURCE_DIR}/bench/mpi/*.cpp ${PROJECT_SOURCE_DIR}/examples/*.cpp ${PROJECT_SOURCE_DIR}/examples/*/*.cpp)
  foreach(source ${sources})
    set(missing)
    set(more ${PROJECT_SOURCE_DIR}/examples)
    if(source MATCHES "^bench" AND NOT ATTN_BENCHMARK_INCLUDE_DIR)
      set(missing "Google Benchmark")
    elseif(source MATCHES "^bench" AND NOT ATTN_BENCHMARK_INCLUDE_DIR STREQUAL "/usr/include")
      list(APPEND more ${ATTN_BENCHMARK_INCLUDE_DIR})
    endif()
    if(source MATCHES "mpi" AND NOT TARGET attn::mpi)
      set(missing MPI)
    elseif(source MATCHES "mpi")
      list(APPEND more $<TARGET_PROPERTY:MPI::MPI_CXX,INTERFACE_INCLUDE_DIRECTORIES>)
    elseif(source MATCHES "semantic_search" AND NOT ATTN_JSON_INCLUDE_DIR)
      set(missing nlohmann/json)
    elseif(source MATCHES "25_numpy_module" AND ATTN_PYBIND11_INCLUDE_DIR AND Python3_Development.Module_FOUND)
      list(APPEND more ${Python3_INCLUDE_DIRS})
    elseif(source MATCHES "25_numpy_module")
      set(missing pybind11)
    endif()
    if(missing)
      add_test(NAME ${prefix}source.${source} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${missing} is not installed")
      set_tests_properties(${prefix}source.${source} PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
      continue()
    endif()
    list(JOIN more "\\;" more)  # one argument
    attn_script_test(source.${source} source -DSOURCE=${PROJECT_SOURCE_DIR}/${source} -DPRECOMPILED=${work}/attn.hpp
      "-DMORE_INCLUDE=${more}")
    set_tests_properties(${prefix}source.${source} PROPERTIES FIXTURES_REQUIRED ${prefix}attn)
  endforeach()

  # What .clang-tidy asks of all headers, in ten seconds.
  find_program(CLANG_TIDY NAMES clang-tidy DOC "clang-tidy, for the test house.clang_tidy")
  if(CLANG_TIDY)
    set(everything ${work}/everything.cpp)
    file(WRITE ${everything} "#include <attn/attn.hpp>\n")
    set(warnings)
    if(NOT ATTN_WERROR)  # other versions have other checks
      set(warnings --warnings-as-errors=-*)
    endif()
    set(mpi_include)
    if(TARGET attn::mpi)
      file(GLOB mpi_headers RELATIVE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/include/attn/mpi/*.hpp)
      list(TRANSFORM mpi_headers REPLACE "(.+)" "#include <\\1>\n")
      file(APPEND ${everything} ${mpi_headers})
      set(mpi_include $<TARGET_PROPERTY:MPI::MPI_CXX,INTERFACE_INCLUDE_DIRECTORIES>)
    endif()
    add_test(NAME ${prefix}house.clang_tidy
      COMMAND ${CLANG_TIDY} --quiet ${warnings} --config-file=${PROJECT_SOURCE_DIR}/.clang-tidy ${everything} -- -std=c++20
        -I${PROJECT_SOURCE_DIR}/include
        -isystem "$<JOIN:$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>;${mpi_include},;-isystem;>"
      COMMAND_EXPAND_LISTS)
    set_tests_properties(${prefix}house.clang_tidy PROPERTIES COST 20)
  else()
    add_test(NAME ${prefix}house.clang_tidy COMMAND ${CMAKE_COMMAND} -E echo "clang-tidy is not installed")
    set_tests_properties(${prefix}house.clang_tidy PROPERTIES SKIP_REGULAR_EXPRESSION "clang-tidy is not installed")
  endif()
  return()
endif()

# Programs without exceptions.
if(NOT ATTN_SANITIZE)
  add_executable(attn_test_no_exceptions compile/no_exceptions.cpp)
  target_link_libraries(attn_test_no_exceptions PRIVATE attn::attn Threads::Threads)
  target_compile_options(attn_test_no_exceptions PRIVATE -fno-exceptions -fno-rtti -O1)
  add_test(NAME ${prefix}house.no_exceptions COMMAND attn_test_no_exceptions)
  set_tests_properties(${prefix}house.no_exceptions PROPERTIES LABELS attn_test_no_exceptions)
endif()

# Caches of codes without signed zeros.
add_executable(attn_test_no_signed_zeros compile/no_signed_zeros.cpp)
target_link_libraries(attn_test_no_signed_zeros PRIVATE attn::attn)
target_compile_options(attn_test_no_signed_zeros PRIVATE -fno-signed-zeros -O2)
add_test(NAME ${prefix}house.no_signed_zeros COMMAND attn_test_no_signed_zeros)
set_tests_properties(${prefix}house.no_signed_zeros PROPERTIES LABELS attn_test_no_signed_zeros)

# Two translation units may include everything, and a third one less.
add_executable(attn_test_two_units compile/two_units_main.cpp compile/two_units_other.cpp compile/two_units_one_operator.cpp)
target_link_libraries(attn_test_two_units PRIVATE attn_test_support)
target_compile_options(attn_test_two_units PRIVATE -O1)
add_test(NAME ${prefix}house.two_units COMMAND attn_test_two_units)
set_tests_properties(${prefix}house.two_units PROPERTIES LABELS attn_test_two_units)

# README.md is short; the C++ blocks of all README files compile, and their links lead somewhere.
set(with_mpi OFF)
set(mpi_include)
if(TARGET attn::mpi)
  set(with_mpi ON)
  set(mpi_include $<TARGET_PROPERTY:MPI::MPI_CXX,INTERFACE_INCLUDE_DIRECTORIES>)
endif()
if(Python3_FOUND)
  add_test(NAME ${ATTN_TESTS_PREFIX}house.readme
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/readme.py ${CMAKE_CXX_COMPILER}
      ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_BINARY_DIR}/readme -I ${PROJECT_SOURCE_DIR}/include
      -isystem "$<JOIN:$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>;${mpi_include},;-isystem;>"
    COMMAND_EXPAND_LISTS)
  # What a user's compiler has to do for each header, and for one call of each operator: lines and bytes, not seconds.
  set(weights ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/weights.py)
  add_test(NAME ${prefix}house.headers COMMAND ${weights} headers)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT ATTN_SANITIZE)
    set(to_compile ${work}/eigen_of_weights.hpp ${CMAKE_CXX_COMPILER} -I ${PROJECT_SOURCE_DIR}/include -isystem)
    set(eigen "$<JOIN:$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>,\\;-isystem\\;>")
    add_test(NAME ${prefix}weight.precompile COMMAND ${weights} precompile ${to_compile} "${eigen}" COMMAND_EXPAND_LISTS)
    set_tests_properties(${prefix}weight.precompile PROPERTIES FIXTURES_SETUP ${prefix}weights COST 100)
    file(GLOB calls CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/compile/one_*.cpp
      ${CMAKE_CURRENT_SOURCE_DIR}/compile/model_*.cpp)
    foreach(source ${calls})
      string(REGEX REPLACE ".*/(one_)?(.*).cpp" "\\2" name ${source})
      add_test(NAME ${prefix}weight.${name} COMMAND ${weights} call ${source} ${to_compile} "${eigen}" COMMAND_EXPAND_LISTS)
      set_tests_properties(${prefix}weight.${name} PROPERTIES FIXTURES_REQUIRED ${prefix}weights COST 5)
    endforeach()
  endif()
  # What names every operator by hand is complete.
  add_test(NAME ${ATTN_TESTS_PREFIX}house.complete
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/complete.py ${PROJECT_SOURCE_DIR} ${operators})
  # What users name is in public headers, and where the guide says.
  add_test(NAME ${ATTN_TESTS_PREFIX}house.names
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/names.py ${PROJECT_SOURCE_DIR})
  # attn::compiled holds all that runs, and links.
  if(CMAKE_NM)
    add_test(NAME ${ATTN_TESTS_PREFIX}house.compiled
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/compiled.py ${PROJECT_SOURCE_DIR}
        ${PROJECT_BINARY_DIR} ${CMAKE_NM} ${CMAKE_CXX_COMPILER} -I ${PROJECT_SOURCE_DIR}/include
        -isystem "$<JOIN:$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>,;-isystem;>"
      COMMAND_EXPAND_LISTS)
    set_tests_properties(${ATTN_TESTS_PREFIX}house.compiled PROPERTIES COST 20)
  endif()
  # The headers use no word that is a macro of windows.h, Qt, X11 or others, and leave no macro defined but the version,
  # the namespace and what names the compiler and the processor.
  add_test(NAME ${ATTN_TESTS_PREFIX}house.macros
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compile/macros.py ${CMAKE_CXX_COMPILER}
      ${PROJECT_SOURCE_DIR}/include/attn ATTN_VERSION* ATTN_ISA* ATTN_INLINE ATTN_HAS_AMX -- -I ${PROJECT_SOURCE_DIR}/include
      -isystem "$<JOIN:$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>;${mpi_include},;-isystem;>"
    COMMAND_EXPAND_LISTS)
endif()

# An outside project uses the library: installed and found, as a subdirectory, and fetched.
foreach(from package subdirectory fetch)
  add_test(NAME ${prefix}installed.${from}
    COMMAND ${CMAKE_COMMAND} -DFROM=${from} -DVERSION=${PROJECT_VERSION} -DSOURCE=${PROJECT_SOURCE_DIR} -DBUILD=${PROJECT_BINARY_DIR}
      -DWORK=${CMAKE_CURRENT_BINARY_DIR}/installed_${from} -DCOMPILER=${CMAKE_CXX_COMPILER} "-DEigen3_DIR=${Eigen3_DIR}"
      "-DEIGEN_INCLUDE_DIR=${ATTN_EIGEN_INCLUDE_DIR}" -DWITH_MPI=${with_mpi} -P ${CMAKE_CURRENT_SOURCE_DIR}/installed/try.cmake)
  set_tests_properties(${prefix}installed.${from} PROPERTIES COST 20)
endforeach()
add_test(NAME ${prefix}installed.directories
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DWORK=${CMAKE_CURRENT_BINARY_DIR}/installed_directories
    -DCOMPILER=${CMAKE_CXX_COMPILER} "-DEigen3_DIR=${Eigen3_DIR}" "-DEIGEN_INCLUDE_DIR=${ATTN_EIGEN_INCLUDE_DIR}"
    -P ${CMAKE_CURRENT_SOURCE_DIR}/installed/directories.cmake)
