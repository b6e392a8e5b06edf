"""Prompt caching through the whole cluster: pinned, isolated, listed, unpinned and flushed."""

import asyncio
from typing import Any

from typer.testing import CliRunner

from baton.cli.cache import app
from baton.store import StoredModel
from tests.support.cluster import CHAT, COMPLETIONS, Cluster, running_cluster

SYSTEM = "You are a patient teacher of small machines who answers briefly. " * 2
CONTROL = {"type": "ephemeral", "ttl": "1h"}


def chat(question: str, **part: Any) -> dict[str, Any]:
    system = [{"type": "text", "text": SYSTEM, **part}]
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


async def crowd_out(cluster: Cluster) -> None:
    """Other prompts, of more blocks than the pools have."""
    for number in range(6):
        prompt = [number + 1] * 300
        await cluster.ask(COMPLETIONS, prompt=prompt, max_tokens=2, ignore_eos=True)


async def baton_cache(cluster: Cluster, *arguments: str) -> str:
    url = ["--url", f"http://127.0.0.1:{cluster.port}"]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *url])
    assert result.exit_code == 0, result.output
    return result.output


async def test_a_marked_part_stays_cached_on_both_workers_until_it_is_unpinned(
    tiny_chat: StoredModel,
) -> None:
    async with running_cluster(
        tiny_chat, num_blocks=60, router={"decode_prefills": "never"}
    ) as cluster:
        plain = await cluster.ask(CHAT, **chat("one?"))
        await crowd_out(cluster)
        assert (await cluster.ask(CHAT, **chat("one?"))).num_cached == 0, "nothing was pinned"
        marked = chat("one?", cache_control=CONTROL)
        assert (await cluster.ask(CHAT, **marked)).text == plain.text
        await crowd_out(cluster)
        sent = (await cluster.totals(cluster.decodes)).blocks_transferred
        other = await cluster.ask(CHAT, **chat("and two?"))
        pinned_tokens = (len("system\n") + 1 + len(SYSTEM)) // 16 * 16
        assert other.num_cached == pinned_tokens
        shipped = (await cluster.totals(cluster.decodes)).blocks_transferred - sent
        assert shipped == -(-other.counts[0] // 16) - pinned_tokens // 16, "decode kept it too"

        caches = (await cluster.client.get("/v1/cache")).json()["data"]
        assert sorted(cache["role"] for cache in caches) == ["decode", "prefill"]
        for cache in caches:
            (pin,) = cache["pins"]
            assert pin["tokens"] == pin["cached_tokens"] == pinned_tokens
            assert 3500 < pin["expires_in_s"] <= 3600
            assert cache["pinned_blocks"] == pinned_tokens // 16
            assert cache["evicted_blocks"] > 60 and cache["pins_broken"] == 0
            assert cache["reused_blocks"] > 0
        assert pin["id"] in await baton_cache(cluster, "ls")
        said = await baton_cache(cluster, "unpin", pin["id"])
        assert "prefill-0" in said and "decode-0" in said
        await crowd_out(cluster)
        assert (await cluster.ask(CHAT, **chat("one?"))).num_cached == 0
        again = await cluster.client.delete(f"/v1/cache/pins/{pin['id']}")
        assert again.status_code == 404 and again.json()["error"]["param"] == "pin"
        await cluster.settle()


async def test_salts_never_share_and_flushing_forgets(tiny_chat: StoredModel) -> None:
    async with running_cluster(tiny_chat, router={"decode_prefills": "never"}) as cluster:
        said = await baton_cache(cluster, "pin", SYSTEM, "--chat", "--salt", "a", "--ttl", "10m")
        assert "0 of" in said
        cached = {
            salt: (await cluster.ask(CHAT, **chat("x?"), **({"cache_salt": salt} if salt else {})))
            for salt in ("b", "", "a")
        }
        assert {salt: answer.num_cached > 0 for salt, answer in cached.items()} == {
            "b": False,
            "": False,
            "a": True,
        }
        assert len({answer.text for answer in cached.values()}) == 1
        said = await baton_cache(cluster, "flush")
        assert "on 2 workers" in said and "Flushed 0" not in said
        for cache in (await cluster.client.get("/v1/cache")).json()["data"]:
            assert cache["known_blocks"] == 0 and cache["pins"] == []
        assert (await cluster.ask(CHAT, **chat("x?"), cache_salt="a")).num_cached == 0
        await cluster.settle()


async def test_a_tenant_pins_no_more_than_its_quota(tiny_chat: StoredModel) -> None:
    async with running_cluster(tiny_chat, num_blocks=64, pin_quota=0.05) as cluster:
        body = chat("x?", cache_control=CONTROL)
        for tenant in ("a", "b", "b"):
            headers = {"x-baton-tenant": tenant}
            answer = await cluster.client.post(CHAT, json=body, headers=headers)
            assert answer.status_code == 200
        for cache in (await cluster.client.get("/v1/cache")).json()["data"]:
            assert cache["tenant_quota_blocks"] == 3
            for pin in cache["pins"]:
                assert pin["tokens"] == 3 * 16
        wrong = await cluster.post(
            CHAT, **chat("x?", cache_control={"type": "ephemeral", "ttl": "5 minutes"})
        )
        assert wrong.status_code == 400
        error = wrong.json()["error"]
        assert error["param"] == "messages" and "cache_control.ttl" in error["message"]
        await cluster.settle()
