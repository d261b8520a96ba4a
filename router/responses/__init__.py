"""OpenAI's Responses API, translated to chat.

request: its bodies, and the chat requests that they become
answers: response objects, whole or as events
shared: the responses of all routers, by their ids
store: responses that can be continued, read, cancelled and deleted
"""
