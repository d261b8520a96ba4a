"""How a cluster's parts bear a thousand workers of each pool, with stubs in place of workers.

router     what one request and one report cost a router
directory  joins and leaves through a real directory, in a local Ray
"""
