namespace of_each_level {
int variable = 1;
}
