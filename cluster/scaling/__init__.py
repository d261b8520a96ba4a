"""How many workers each pool should have, decided by the load.

needs       how many workers the load of each pool takes (pure)
policy      from needs to sizes: bounds, hysteresis, GPU budget, pins (pure)
roles       which worker takes another role (pure)
autoscaler  the loop around them: loads in, sizes and drains out
"""
