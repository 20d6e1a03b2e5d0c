"""HTTP only: OpenAI's shapes over a TextEngine. Knows no engine, no tokenizer and no llama.cpp."""
