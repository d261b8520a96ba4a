"""What clients may ask for: typed requests and their checks. No network, no tokenizer.

body: base class of what is parsed. generate_request: the table of fields. chat_request,
completion_request: the fields of each kind. chat_messages, tools, structured_output: their parts.
text_requests: Tokenize and Detokenize. unserved: fields that are known and refused. parse: from
JSON and protobuf fields to these types. large_json: large bodies. request_id: names of requests.
"""
