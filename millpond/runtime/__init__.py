"""The model runtime: one protocol, llama.cpp behind it, and a fake that imitates its traps."""
