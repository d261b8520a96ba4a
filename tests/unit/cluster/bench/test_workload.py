import json

import pytest

from cluster.bench.workload import Ask, Style, fit_trace, read_trace, spread_ticks


def test_prompts_repeat_by_seed_and_number_only():
    style = Style(seed=3, vocab_size=1000)
    ask = Ask(prompt_tokens=50, output_tokens=4)
    first, again, other = (style.body(ask, n)["prompt"] for n in (1, 1, 2))
    assert first == again != other
    assert len(first) == 50
    assert all(256 <= token < 1000 for token in first)
    assert Style(seed=4, vocab_size=1000).body(ask, 1)["prompt"] != first


def test_text_has_about_one_word_a_token():
    body = Style(text=True).body(Ask(prompt_tokens=20, output_tokens=1), 0)
    assert len(body["prompt"].split()) == 20
    assert "ignore_eos" not in Style(ignore_eos=False).body(
        Ask(prompt_tokens=1, output_tokens=1), 0
    )


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure_traces(tmp_path):
    path = write(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,110,0\n",
    )
    first, second = read_trace(path)
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at == pytest.approx(0.5)
    assert second.output_tokens == 1


def test_servegen_traces(tmp_path):
    text = "t_s,client,input_tokens,output_tokens\n2.0,1,7,8\n1.5,0,5,6\n"
    asks = read_trace(write(tmp_path, "s.csv", text))
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in asks] == [(0.0, 5, 6), (0.5, 7, 8)]


def test_mooncake_traces(tmp_path):
    rows = [{"timestamp": 3000 * n, "input_length": 9, "output_length": 2} for n in (1, 1, 2)]
    asks = read_trace(write(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows))))
    assert [ask.at for ask in asks] == [0.0, 0.0, 3.0]
    assert [ask.at for ask in spread_ticks(asks)] == [0.0, 1.5, 3.0]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "t_s,client\n"])
def test_other_files_are_refused(tmp_path, text):
    with pytest.raises((ValueError, KeyError)):
        read_trace(write(tmp_path, "x.csv", text))


def test_traces_are_clipped_cut_and_sped_up():
    asks = [Ask(at=float(n), prompt_tokens=10**n, output_tokens=5 * n) for n in range(5)]
    fitted = fit_trace(asks, limit=3, speed=2.0, max_prompt=50, max_output=7)
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in fitted] == [
        (0.0, 1, 0),
        (0.5, 10, 5),
        (1.0, 50, 7),
    ]
