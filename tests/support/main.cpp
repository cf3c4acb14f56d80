// The main function, where Catch2 v2 leaves it to us.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
