// Compiled with the header of the same name, which is all it is for.
