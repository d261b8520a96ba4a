"""The model's text: strings on the client's side, token ids on the workers'.

tokenizer: a model's folder: text to ids, end tokens
control_tokens: role markers in content stay text
chat_template: messages to a prompt
detokenizer: ids to text, incrementally and one by one
text_stream, stop_strings: the text of one output, cut at stop strings
tool_formats, tool_parser: how models write tool calls; calls out of an output's text
"""
