"""The HTTP front end: OpenAI's API, JSON and server-sent events, on uvicorn.

server: the listener. connection: one connection and its bounds. app: the paths. body: reading
bodies. answers: sending answers. chunks, logprobs: what is in them. errors: statuses and error
objects. document: /openapi.json.
"""
