"""Compiled kernels behind attention and, in later chapters, behind products: each imported only when it is used."""
