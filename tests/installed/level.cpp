const char* level() { return ATTN_DISPATCH_LEVEL; }
