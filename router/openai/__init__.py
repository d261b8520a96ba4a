"""The HTTP front end: OpenAI's API in JSON and server-sent events, on uvicorn.

server: the listener
connection: one connection and its limits
app: the paths
body: reading the body of a request
answers: sending answers and errors, and watching for disconnects
chunks, logprobs: the objects in answers and streams
errors: statuses and error objects
document: /openapi.json
"""
