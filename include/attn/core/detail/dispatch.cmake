# attn_dispatch(TARGET SOURCE LEVELS LEVEL...): adds SOURCE to TARGET, compiled once for each LEVEL, which is a value of
# the compiler's -march. The functions that it defines may be called as if it had been compiled once: each call goes to the
# level with the most instructions that the processor has. The guide (../../README.md, "Compiler flags") says what may cross.
#
# How: a library of objects for each level; this file as a script, which makes the symbols of each level local and
# writes the table of the levels (dispatch.hpp) with a jump for each function; an object of that.
function(attn_dispatch target source)
  cmake_parse_arguments(PARSE_ARGV 2 given "" "" LEVELS)
  if(NOT given_LEVELS OR given_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "attn_dispatch: expected TARGET SOURCE LEVELS LEVEL...; found ${ARGV}")
  endif()
  set(folder)
  set(type)
  if(TARGET ${target})
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(type ${target} TYPE)
    get_target_property(alias_of ${target} ALIASED_TARGET)
  endif()
  if(NOT folder STREQUAL CMAKE_CURRENT_SOURCE_DIR OR alias_of OR
      NOT type MATCHES "^(EXECUTABLE|(STATIC|SHARED|MODULE)_LIBRARY)$")
    message(FATAL_ERROR "attn_dispatch: expected a program of this folder, or a static or shared library or module; "
      "found ${target}")
  endif()
  list(REMOVE_DUPLICATES given_LEVELS)
  get_filename_component(path ${source} ABSOLUTE)
  get_source_file_property(generated ${path} GENERATED)
  if(IS_DIRECTORY ${path} OR NOT (EXISTS ${path} OR generated))
    message(FATAL_ERROR "attn_dispatch: expected a source; found no file ${source}")
  endif()
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$" OR WIN32 OR APPLE OR NOT CMAKE_SIZEOF_VOID_P EQUAL 8 OR
      NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64|aarch64|arm64)$")
    message(FATAL_ERROR "attn_dispatch: expected GCC or Clang for Linux on x86-64 or AArch64; found "
      "${CMAKE_CXX_COMPILER_ID} for ${CMAKE_SYSTEM_NAME} on ${CMAKE_SYSTEM_PROCESSOR}")
  elseif(NOT CMAKE_OBJCOPY OR NOT CMAKE_OBJDUMP)
    message(FATAL_ERROR "attn_dispatch: expected objcopy and objdump; found none: install binutils, or set CMAKE_OBJCOPY "
      "and CMAKE_OBJDUMP")
  endif()
  include(CheckCXXCompilerFlag)
  foreach(level ${given_LEVELS})
    string(MAKE_C_IDENTIFIER "ATTN_HAS_MARCH_${level}" known)
    check_cxx_compiler_flag(-march=${level} ${known})
    if(NOT ${known})
      message(FATAL_ERROR "attn_dispatch: expected levels that ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} "
        "knows as -march=LEVEL; found ${level}")
    endif()
  endforeach()

  file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR} ${path})
  string(REGEX REPLACE "[^A-Za-z0-9_.+-]" "_" name ${name})
  set(begin ${target}.${name})
  # At the end of the folder, when the target has the properties that it will have.
  cmake_language(EVAL CODE "cmake_language(DEFER CALL attn_dispatch_copy_properties [[${target}]] [[${begin}]]
    [[${given_LEVELS}]])")
  set(folder ${CMAKE_CURRENT_BINARY_DIR}${CMAKE_FILES_DIRECTORY}/${begin}.dir/levels_$<CONFIG>)
  set(script ${CMAKE_CURRENT_FUNCTION_LIST_FILE})
  # The chooser has the target's flags; a level has its own behind them. Objects for link-time optimisation have no
  # symbols to make local; functions of attn::compiled are of one level only; GCC's unique symbols would be one for all levels.
  set(libraries)
  set(objects)
  set(outputs)
  foreach(level ${given_LEVELS} chooser)
    set(library ${begin}.${level})
    if(level STREQUAL "chooser")
      add_library(${library} OBJECT EXCLUDE_FROM_ALL ${folder}/chooser.cpp)
    else()
      add_library(${library} OBJECT EXCLUDE_FROM_ALL ${path})
      list(APPEND libraries ${library})
      list(APPEND objects $<TARGET_OBJECTS:${library}>)
      list(APPEND outputs ${folder}/${level}.o)
    endif()
    foreach(property INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_OPTIONS COMPILE_FEATURES)
      set_property(TARGET ${library} APPEND PROPERTY ${property} $<TARGET_PROPERTY:${target},${property}>)
    endforeach()
    set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON INTERPROCEDURAL_OPTIMIZATION OFF
      UNITY_BUILD OFF)
    target_compile_options(${library} PRIVATE -fno-lto)
    if(NOT level STREQUAL "chooser")
      target_compile_definitions(${library} PRIVATE ATTN_DISPATCH_LEVEL="${level}")
      target_compile_options(${library} PRIVATE -march=${level} -UATTN_COMPILED
        "SHELL:-include attn/core/detail/dispatch.hpp" $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
    endif()
  endforeach()
  add_custom_command(OUTPUT ${folder}/chooser.cpp ${outputs}
    COMMAND ${CMAKE_COMMAND} "-DLEVELS=${given_LEVELS}" "-DOBJECTS=${objects}" -DFOLDER=${folder} -DSOURCE=${source}
      -DOBJCOPY=${CMAKE_OBJCOPY} -DOBJDUMP=${CMAKE_OBJDUMP} -P ${script}
    DEPENDS ${libraries} ${objects} ${script} VERBATIM COMMENT "Levels of ${source}")
  target_sources(${target} PRIVATE ${outputs} $<TARGET_OBJECTS:${begin}.chooser>)
endfunction()

function(attn_dispatch_copy_properties target begin levels)
  get_target_property(libraries ${target} LINK_LIBRARIES)
  foreach(library attn::fast attn::compiled)
    if(${library} IN_LIST libraries)
      message(FATAL_ERROR "attn_dispatch: expected ${target} to link attn::attn; found ${library}, whose flags are for one "
        "kind of machine alone")
    endif()
  endforeach()
  get_target_property(dependencies ${target} MANUALLY_ADDED_DEPENDENCIES)
  foreach(level ${levels} chooser)
    foreach(property LINK_LIBRARIES CXX_STANDARD CXX_STANDARD_REQUIRED CXX_EXTENSIONS CXX_VISIBILITY_PRESET
        VISIBILITY_INLINES_HIDDEN)
      get_target_property(value ${target} ${property})
      if(NOT value MATCHES "NOTFOUND$")
        set_property(TARGET ${begin}.${level} PROPERTY ${property} ${value})
      endif()
    endforeach()
    if(dependencies)
      add_dependencies(${begin}.${level} ${dependencies})
    endif()
  endforeach()
endfunction()

if(NOT CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  return()
endif()
cmake_minimum_required(VERSION 3.20)

# What the objects define: lines of objdump are address, flags, section, size, name. g: global, F: function.
set(functions)
foreach(level object IN ZIP_LISTS LEVELS OBJECTS)
  execute_process(COMMAND ${OBJDUMP} -h -t ${object} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ g [^\n]*" globals "${text}")
  set(variables ${globals})
  list(FILTER variables EXCLUDE REGEX "^[0-9a-f]+ g    [ i]F|[ \t](attn_dispatch_needs$|__odr_asan)")
  if(variables)
    list(TRANSFORM variables REPLACE ".*[ \t]" "")
    list(JOIN variables ", " variables)
    message(FATAL_ERROR "attn_dispatch: expected functions alone in ${SOURCE}, as each level would have a variable or a "
      "class with virtual functions of its own; found ${variables}")
  endif()
  list(FILTER globals INCLUDE REGEX "^[0-9a-f]+ g    [ i]F")
  list(TRANSFORM globals REPLACE ".*\t[0-9a-f]+ +" "")
  list(SORT globals)
  if(NOT functions)
    set(functions ${globals})
    list(GET LEVELS 0 first)
  endif()
  if(NOT globals OR NOT globals STREQUAL "${functions}")
    list(JOIN globals ", " globals)
    list(JOIN functions ", " functions)
    string(REPLACE ".hidden " "" globals "${globals}")
    string(REPLACE ".hidden " "" functions "${functions}")
    message(FATAL_ERROR "attn_dispatch: expected the same functions at each level of ${SOURCE}, whose parameters are of "
      "none of attn's types; found \"${globals}\" at ${level}, \"${functions}\" at ${first}")
  endif()
  # Types of exceptions are data, and stay one for all.
  string(REGEX MATCHALL "[ \t]_ZT[IS][^\n]*" types "${text}")
  string(REGEX REPLACE "[ \t]" "" types_${level} "${types}")
  string(REGEX MATCHALL "[ \t]\\.(init|fini)_array[^ \t\n]*" arrays "${text}")
  string(REGEX REPLACE "[ \t]" "" arrays "${arrays}")
  list(REMOVE_DUPLICATES arrays)
  set(arrays_${level} ${arrays})
endforeach()
list(TRANSFORM functions REPLACE "^\\.(hidden|internal|protected) " "" OUTPUT_VARIABLE names)
list(GET OBJECTS 0 object)
execute_process(COMMAND ${OBJDUMP} -C -t ${object} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE "Eigen::(half|bfloat16)" "\\1" text "${text}")
if(text MATCHES "[0-9a-f]+ g    [ i]F [^\n]*\t[0-9a-f]+ +(\\.[a-z]+ )?([^\n]*Eigen::[^\n]*)")
  message(FATAL_ERROR "attn_dispatch: expected functions of plain types in ${SOURCE}, as pointers are; found Eigen's, "
    "which each level aligns in its own way, in ${CMAKE_MATCH_2}")
endif()

# The first function's name is in the names of all that is not the user's, for it is one in the program.
list(GET names 0 only)
list(LENGTH names count)
set(declared)
set(table)
set(number 0)
foreach(level object IN ZIP_LISTS LEVELS OBJECTS)
  string(MAKE_C_IDENTIFIER "${level}" id)
  set(renamed "attn_dispatch_needs ${only}.needs.${id}\n")
  set(kept attn_dispatch_needs ${only}.needs.${id} ${types_${level}})
  set(pointers)
  set(index 0)
  foreach(name ${names})
    string(APPEND renamed "${name} ${name}.${id}\n")
    list(APPEND kept ${name} ${name}.${id})
    string(APPEND declared "void f_${number}_${index}() HIDDEN(\"${name}.${id}\");\n")
    list(APPEND pointers f_${number}_${index})
    math(EXPR index "${index} + 1")
  endforeach()
  set(sections)
  foreach(array ${arrays_${level}})
    string(REGEX REPLACE "^\\.(init|fini)_array.*" "attn_\\1_${only}_${id}" section ${array})
    list(APPEND sections --rename-section ${array}=${section})
  endforeach()
  set(bounds)
  foreach(kind init fini)
    foreach(end start stop)
      if("${sections}" MATCHES "attn_${kind}_")
        string(APPEND declared "extern void (*const ${kind}_${end}_${number}[])() "
          "HIDDEN(\"__${end}_attn_${kind}_${only}_${id}\");\n")
        list(APPEND bounds ${kind}_${end}_${number})
      else()
        list(APPEND bounds nullptr)
      endif()
    endforeach()
  endforeach()
  list(JOIN pointers ", " pointers)
  list(JOIN bounds ", " bounds)
  list(JOIN kept "\n" kept)
  string(APPEND declared "extern const std::uint64_t needs_${number} HIDDEN(\"${only}.needs.${id}\");\n"
    "static void (*const functions_${number}[])() = {${pointers}};\n")
  string(APPEND table "    {\"${level}\", &needs_${number}, functions_${number}, ${bounds}},\n")
  file(WRITE ${FOLDER}/${level}.renamed "${renamed}")
  file(WRITE ${FOLDER}/${level}.kept "${kept}\n")
  # Without groups, of which the linker would keep one for all levels.
  execute_process(COMMAND ${OBJCOPY} --remove-section=.group --remove-section=.llvm_addrsig ${sections}
    --redefine-syms=${FOLDER}/${level}.renamed --keep-global-symbols=${FOLDER}/${level}.kept ${object}
    ${FOLDER}/${level}.o COMMAND_ERROR_IS_FATAL ANY)
  math(EXPR number "${number} + 1")
endforeach()

set(jumps)
set(index 0)
foreach(name function IN ZIP_LISTS names functions)
  string(REGEX REPLACE "^\\.([a-z]+) .*" "\\\\n.\\1 ${name}" visibility "${function}")
  if(visibility STREQUAL function)
    set(visibility)
  endif()
  string(APPEND jumps "__asm__(\".pushsection .text\\n.globl ${name}${visibility}\\n.type ${name}, %function\\n"
    "${name}:\\n\" JUMP(\"${index}\") \".size ${name}, .-${name}\\n.popsection\");\n")
  math(EXPR index "${index} + 1")
endforeach()
file(WRITE ${FOLDER}/chooser.cpp "// Written by attn_dispatch for ${SOURCE}: takes a level before the program begins.
#include <attn/core/detail/dispatch.hpp>
#define HIDDEN(symbol) __asm__(symbol); __asm__(\".hidden \" symbol)
#if defined(__x86_64__)
#define JUMP(index) \"endbr64\\njmp *attn_dispatch_chosen+8*\" index \"(%rip)\\n\"
#else  // bti c
#define JUMP(index)                                                                                   \\
  \"hint 34\\nadrp x16, attn_dispatch_chosen+8*\" index \"\\n\"                                           \\
  \"ldr x16, [x16, :lo12:attn_dispatch_chosen+8*\" index \"]\\nbr x16\\n\"
#endif
extern \"C\" {
${declared}}
namespace {
constexpr attn::detail::dispatch::level levels[] = {
${table}};
const attn::detail::dispatch::level* taken;
void none() { attn::detail::dispatch::no_level(levels); }
__attribute__((used)) void (*chosen[${count}])() __asm__(\"attn_dispatch_chosen\");
__attribute__((constructor(101))) void choose() {
  taken = attn::detail::dispatch::best_level(levels);
  for (int n = 0; n < ${count}; ++n) chosen[n] = taken ? taken->functions[n] : none;
}
// Static objects of that level alone: the others' code may be for other processors.
__attribute__((constructor)) void initialise() {
  if (taken) attn::detail::dispatch::call_all(taken->init_start, taken->init_stop);
}
__attribute__((destructor)) void finalise() {
  if (taken) attn::detail::dispatch::call_all(taken->fini_start, taken->fini_stop);
}
}  // namespace
${jumps}")
