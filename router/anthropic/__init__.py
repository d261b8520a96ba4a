"""Anthropic's Messages API, translated to chat.

request: its bodies, and the chat requests that they become
answers: messages, whole or as events
errors: its error objects
"""
