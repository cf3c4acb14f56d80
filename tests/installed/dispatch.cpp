#include <iostream>

const char* level();

int main() { std::cout << "level " << level() << '\n'; }
