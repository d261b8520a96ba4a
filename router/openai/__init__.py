"""The HTTP front end: OpenAI's API in JSON and server-sent events, on uvicorn.

server: the listener, its connections and their limits
app: the paths, and who may call them
paths: generating, for every API
lookups: what else is asked: token ids, counts, models
stored: responses that are kept
exchange: reading bodies, sending answers and errors, watching for disconnects
chunks: the objects in answers and streams, log-probabilities in them
errors: statuses and error objects
document: /openapi.json
"""
