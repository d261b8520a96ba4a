"""What clients may ask for: typed requests and their checks. No network, no tokenizer.

generate_request: the table of fields that chat and completions share; ids of requests
endpoints: the fields of chat and of completions; Tokenize, Detokenize
chat_messages, tools, structured_output: the parts of a request
body: the base class of all these
parse: from JSON bodies and protobuf fields to typed requests; fields that are refused
translated: chat requests out of those of other APIs
"""
