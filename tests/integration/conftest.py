"""Integration runs on the loop that Ray Serve and the routers use."""

import pytest
import uvloop


@pytest.fixture(scope="session")
def event_loop_policy():
    return uvloop.EventLoopPolicy()
