"""What clients may ask for: typed requests and their checks. No network, no tokenizer.

generate_request: the table of fields that chat and completions share; ids of requests
chat_request, completion_request: the fields of one kind
chat_messages, tools, structured_output: the parts of a request
text_requests: Tokenize and Detokenize
body: the base class of all these
parse: from JSON bodies and protobuf fields to typed requests; fields that are refused
"""
