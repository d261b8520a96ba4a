"""The Ray Serve applications, one for each pool.

deployments     the applications and their scale
changes         what a changed configuration, model or version changes: pure
builders        entry points for `serve deploy` and KubeRay
worker_replica  builds, reports and drains one worker
follower_rank   its tensor-parallel ranks above 0
router_replica  the same for one router
admin           backend of the router's admin service: view, scale, drain
pool_backend    how the autoscaler changes pools
control         calls to Serve's controller
"""
