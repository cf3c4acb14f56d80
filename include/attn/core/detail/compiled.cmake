# attn::compiled: attn::attn, and what the operators run, compiled once. Its sources are written here: one for each header
# that names runs (compiled.hpp) and each type. Nothing is compiled unless a target links it or ATTN_INSTALL_COMPILED is ON.
#
# ATTN_COMPILED_TYPES: types of elements. ATTN_COMPILED_FLAGS: the compiler's flags, which its users are compiled with,
# too, for the functions of other instructions have other names.
set(attn_compiled_types float double half bfloat16)
set(ATTN_COMPILED_TYPES "${attn_compiled_types}" CACHE STRING "Types of elements of attn::compiled")
set(ATTN_COMPILED_FLAGS "" CACHE STRING "Flags of attn::compiled and of what links it, as \"-O3 -march=x86-64-v3\"; empty: those of attn::fast")
foreach(type ${ATTN_COMPILED_TYPES})
  if(NOT type IN_LIST attn_compiled_types)
    message(FATAL_ERROR "ATTN_COMPILED_TYPES: expected some of ${attn_compiled_types}; found ${type}")
  endif()
endforeach()
if(NOT "float" IN_LIST ATTN_COMPILED_TYPES)  # numbers of 16 bits compute in it
  message(FATAL_ERROR "ATTN_COMPILED_TYPES: expected float among them; found ${ATTN_COMPILED_TYPES}")
endif()

function(attn_add_compiled include)
  set(sources)
  set(definitions ATTN_COMPILED)
  foreach(type ${ATTN_COMPILED_TYPES})
    string(TOUPPER ATTN_COMPILED_${type} definition)
    list(APPEND definitions ${definition})
  endforeach()
  set(looks_again)  # at each build, for those who add headers
  if(attn_top_level)
    set(looks_again CONFIGURE_DEPENDS)
  endif()
  file(GLOB_RECURSE headers ${looks_again} RELATIVE ${include} ${include}/attn/*.hpp)
  foreach(header ${headers})
    file(STRINGS ${include}/${header} runs REGEX "^#define ATTN_RUN")
    foreach(type ${ATTN_COMPILED_TYPES})
      set(kinds ATTN_RUN)
      if(type MATCHES "float$|double")  # compute types
        list(APPEND kinds ATTN_RUN_IN)
      endif()
      if(NOT type STREQUAL "double")  # which no cache keeps in fewer bits
        list(APPEND kinds ATTN_RUN_OVER ATTN_RUN_OVER_ROWS)
      endif()
      list(JOIN kinds "|" kinds)
      if(NOT runs MATCHES "#define (${kinds})\\(")
        continue()
      endif()
      string(REGEX REPLACE "^attn/|detail/|[.]hpp$" "" name ${header})
      set(source ${CMAKE_CURRENT_BINARY_DIR}/compiled/${name}_${type}.cpp)
      string(TOUPPER ATTN_COMPILED_${type} definition)
      file(CONFIGURE OUTPUT ${source} CONTENT "// Made by CMake.
#define ATTN_COMPILED
#define ATTN_COMPILED_SOURCE
#define ${definition}
#include <${header}>
")
      list(APPEND sources ${source})
    endforeach()
  endforeach()

  add_library(attn_compiled STATIC EXCLUDE_FROM_ALL ${sources})
  add_library(attn::compiled ALIAS attn_compiled)
  target_link_libraries(attn_compiled PUBLIC attn)
  target_compile_definitions(attn_compiled INTERFACE ${definitions})
  if(ATTN_COMPILED_FLAGS)
    separate_arguments(flags NATIVE_COMMAND "${ATTN_COMPILED_FLAGS}")
    include(CheckCXXCompilerFlag)
    string(MAKE_C_IDENTIFIER "ATTN_HAS_${ATTN_COMPILED_FLAGS}" known)
    check_cxx_compiler_flag("${flags}" ${known})
    if(NOT ${known})
      message(FATAL_ERROR "ATTN_COMPILED_FLAGS: expected flags that ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} "
        "knows; found ${ATTN_COMPILED_FLAGS}")
    endif()
    set(flags "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  else()
    get_target_property(flags attn::fast INTERFACE_COMPILE_OPTIONS)
  endif()
  target_compile_options(attn_compiled PUBLIC ${flags})
  set_target_properties(attn_compiled PROPERTIES EXPORT_NAME compiled POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF
    UNITY_BUILD OFF)  # the level at which a source includes its header is what tells compiled.hpp that it is its own
  target_precompile_headers(attn_compiled PRIVATE <attn/core/kv_cache.hpp>)
  if(MINGW)  # objects of more than 65535 sections
    target_compile_options(attn_compiled PRIVATE -Wa,-mbig-obj)
  endif()
endfunction()
