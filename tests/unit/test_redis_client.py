"""Which Redis a URL names, and what of it may be shown."""

import pytest
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from baton.cluster.redis_client import connect, hide_password


def test_a_plain_url_is_one_server() -> None:
    client = connect("redis://user:p%40ss@host:7000/3")
    assert isinstance(client, Redis)
    kwargs = client.connection_pool.connection_kwargs
    assert (kwargs["host"], kwargs["port"], kwargs["db"]) == ("host", 7000, 3)
    assert (kwargs["username"], kwargs["password"]) == ("user", "p@ss")


def test_a_sentinel_url_names_hosts_service_and_database() -> None:
    pool = connect("rediss+sentinel://u:p@a:1,b/cache/2?ssl_ca_certs=/ca.pem").connection_pool
    assert pool.service_name == "cache"
    manager = pool.sentinel_manager
    addresses = [s.connection_pool.connection_kwargs for s in manager.sentinels]
    assert [(a["host"], a["port"]) for a in addresses] == [("a", 1), ("b", 26379)]
    kwargs = pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("u", "p", 2)
    assert kwargs["ssl_ca_certs"] == "/ca.pem" and "SSL" in pool.connection_class.__name__


def test_a_cluster_url_names_several_nodes() -> None:
    client = connect("redis+cluster://u:p@a:7001,b:7002")
    assert isinstance(client, RedisCluster)
    assert [n.name for n in client.nodes_manager.startup_nodes.values()] == ["a:7001", "b:7002"]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://localhost",
        "redis+sentinel://host:26379",
        "redis+cluster://:7001",
        "redis+cluster://a:port",
        "redis+sentinel://a/cache/first",
        "redis://host:port",
    ],
)
def test_a_wrong_url_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        connect(url)


def test_a_password_is_not_shown() -> None:
    assert hide_password("rediss://user:s3cret@h:1/0") == "rediss://user:***@h:1/0"
    assert hide_password("redis://:s3cret@h:1/0") == "redis://:***@h:1/0"
    assert hide_password("redis+cluster://u:p@a:1,b:2") == "redis+cluster://u:***@a:1,b:2"
    assert hide_password("redis://127.0.0.1:6379/0") == "redis://127.0.0.1:6379/0"
