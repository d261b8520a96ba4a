"""The model's text: strings on the client's side, token ids on the workers'.

tokenizer: a model's folder: text to ids, end tokens
control_tokens: role markers in content stay text
chat_template: messages to a prompt
detokenizer: ids to text, incrementally and one by one
text_stream, stop_strings: the text of one output, cut at stop strings
tool_formats, tool_grammar: how models write tool calls; grammars that enforce it
call_input, call_values, call_readers, call_notations: calls in the notation of each format
tool_parser: calls out of an output's text
reasoning, reasoning_grammar: thoughts out of the text; grammars of what comes after them
"""
