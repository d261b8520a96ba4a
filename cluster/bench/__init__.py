"""The load generator of `baton bench`, for any server with OpenAI's API, or Baton's gRPC.

options: its options, without heavy imports
output: measure; table, JSON and files
runs: closed loops, arrivals at given times, the search for a rate
workload: lengths and arrival times, drawn or from traces (pure)
load: sends the requests
http_stream: an HTTP client that notes when bytes come
grpc_stream: the same over gRPC
measure: what answers say (pure)
page: the HTML report
facts: machine, commit, tables
"""
