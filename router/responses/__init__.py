"""OpenAI's Responses API, translated to chat.

request: its bodies, and the chat requests that they become
answers: response objects, whole or as events
store: responses that can be continued, read, cancelled and deleted
"""
