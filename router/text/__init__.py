"""The model's text: strings on the client's side, token ids on the workers'.

tokenizer: a model's folder: text to ids, end tokens; role markers in content stay text
chat_template: messages to a prompt
text_stream: ids to text, one by one and incrementally, cut at stop strings
tool_formats, tool_parser: how models write tool calls; calls out of an output's text
"""
