#!/usr/bin/env python3
"""Simulates the papers' figures and sets them beside what the papers print.

    bench/paper/figures.py                    HCache's, CaR's and HybridServe's, as tables (some minutes)
    bench/paper/figures.py --only fig10       some
    bench/paper/figures.py --only attentionstore     AttentionStore's (some minutes a case)
    bench/paper/figures.py --only hybridserve        HybridServe's (seconds)
    bench/paper/figures.py --png docs/img     also as plots (needs matplotlib)
    bench/paper/figures.py --quick            a few sessions each: proves the script

Every figure is a scenario in this folder (docs/simulator.md), run by `hcache sim`; the JSON goes to
--work. docs/paper-results.md says what the figures mean and where they differ.
"""

import argparse
import json
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# HCache §6.1: the ranges of TTFT speed-ups over KV offloading and over recomputation, by figure.
PAPER = {
    "hcache-fig9": {"kv": (1.27, 1.90), "recompute": (2.21, 3.57)},
    "hcache-fig10": {"kv": (1.62, 1.93), "recompute": (2.66, 5.73)},
}


# AttentionStore §4.2, §4.3: hit rates in percent, of all requests.
HITS = {
    "attentionstore-fig21": {
        "128G/2T scheduler-aware": 40, "128G/2T lru": 12.9, "128G/2T fifo": 9.5,
        "128G/10T scheduler-aware": 86, "128G/10T lru": 58, "128G/10T fifo": 48},
    "attentionstore-fig13": {
        "LLaMA-13B AS": 86, "LLaMA-65B AS": 71, "LLaMA-70B AS": 89, "Falcon-40B AS": 90},
    "attentionstore-fig22": {
        "LLaMA-13B OF": 86 - 17.6, "LLaMA-65B OF": 71 - 41.5, "LLaMA-70B OF": 89 - 18.1,
        "Falcon-40B OF": 90 - 18.4},
    "attentionstore-fig24": {
        "LLaMA-13B HBM+DRAM": 3.4, "LLaMA-65B HBM+DRAM": 1.7, "LLaMA-70B HBM+DRAM": 7.7,
        "Falcon-40B HBM+DRAM": 19.1},
    # Of returning requests alone.
    "attentionstore-fig23": {"RCC/CCpUT 0.1": 51, "RCC/CCpUT 0.25": 98},
}
# Figs. 14 to 16: by how much the time to first token falls, and prefill throughput and GPU time
# speed up.
SPEEDUPS = {"LLaMA-13B": (0.85, 6.8, 4.0), "LLaMA-65B": (0.61, 2.6, 1.9),
            "LLaMA-70B": (0.87, 7.8, 3.3), "Falcon-40B": (0.86, 7.2, 3.4)}
# §4.2 and Fig. 17: dollars per hour of an A100, of a GB of memory and of a GB of disk; by how much
# AS costs less, and the storage's share of what it costs.
GPU_PRICE, DRAM_PRICE, DISK_PRICE = 5.0, 0.0088, 0.000082
COSTS = {"LLaMA-13B": (0.70, 0.164), "LLaMA-65B": (0.43, 0.09),
         "LLaMA-70B": (0.66, 0.09), "Falcon-40B": (0.68, 0.09)}


# HybridServe §5.2 to §5.5: how many times as fast over all prompts, and at a prompt of 1,920.
HYBRID_OVER = {"FlexGen": 2.19, "act only": 1.35}
ACT_OVER_FLEXGEN = 1.61
HYBRID_OVER_FLEXGEN = {"OPT-6.7B": 2.05, "OPT-66B": 2.33}
STEPS_OVER_ACT = {"OPT-6.7B": (1.23, None), "OPT-30B": (None, 1.6), "OPT-66B": (1.39, 1.56)}
KV_TO_ACT = {"OPT-6.7B": 1.0, "OPT-30B": 2.0, "OPT-66B": 1.78}
TRAFFIC_LESS = {32: 1.27, 64: 1.38}
BUSY = {32: (0.082, 0.356), 128: (0.126, 0.782)}  # FlexGen, HybridServe
TOKENS_SLOWER = {"OPT-30B": 1.45, "OPT-66B": 1.31}  # Fig. 4, half recomputed


# Models whose weights a device does not hold.
TOO_LARGE = {("llama2-13b", "a30"), ("llama2-13b", "rtx4090"), ("opt-30b", "a30"),
             ("opt-30b", "rtx4090")}


def shrink(scenario: Path, small: Path) -> Path:
    """The same scenario for a handful of sessions, in a file of its own."""
    settings = json.loads(scenario.read_text())
    if "workload" in settings:
        settings["workload"] |= {"sessions": 30, "warmup": 0}
        settings["rates"] = settings["rates"][:1]
        settings.pop("warmup_requests", None)
        for case in settings["cases"]:
            if "rates" in case:
                case["rates"] = case["rates"][:1]
    small.write_text(json.dumps(settings))
    return small


def simulate(args: argparse.Namespace, name: str) -> list[dict]:
    out = args.work / f"{name}.json"
    scenario = HERE / f"{name}.json"
    if args.quick:
        scenario = shrink(scenario, args.work / f"{name}-quick.json")
    subprocess.run([args.program, "sim", "--scenario", scenario, "--json", out],
                   check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())["rows"]


def by_point(rows: list[dict]) -> dict:
    points: dict = {}
    for row in rows:
        points.setdefault((row["case"], row["rate"]), {})[row["method"]] = row
    return points


def ttft(row: dict) -> float:
    return row["ttft_ms"]["returning"]["p50"]


def report(name: str, rows: list[dict]) -> None:
    print(f"\n{name}: median TTFT of returning requests in ms, and the others' over the plan's")
    print(f"{'case':>22} {'sessions/s':>10} {'ideal':>8} {'plan':>8} {'kv':>8} {'recompute':>9} "
          f"{'kv/plan':>8} {'rec/plan':>8} {'TBT/ideal':>9} {'device':>7}")
    spans: dict = {"kv": [], "recompute": []}
    for (case, rate), methods in by_point(rows).items():
        plan = methods["plan"]
        ratios = {other: ttft(methods[other]) / ttft(plan) for other in spans}
        for other, ratio in ratios.items():
            spans[other].append(ratio)
        tbt = plan["tpot_ms"]["mean"] / methods["ideal"]["tpot_ms"]["mean"]
        print(f"{case:>22} {rate:>10g} {ttft(methods['ideal']):>8.1f} {ttft(plan):>8.1f} "
              f"{ttft(methods['kv']):>8.1f} {ttft(methods['recompute']):>9.1f} "
              f"{ratios['kv']:>8.2f} {ratios['recompute']:>8.2f} {tbt:>9.3f} "
              f"{100 * plan['device_busy']:>6.0f}%")
    for other, ratios in spans.items():
        low, high = PAPER[name][other]
        met = min(ratios) > low / 1.15 and max(ratios) < high * 1.15
        print(f"  {other} over plan: {min(ratios):.2f} to {max(ratios):.2f}; "
              f"the paper: {low:.2f} to {high:.2f}; within 15 %: {'yes' if met else 'no'}")


def share_found(row: dict, of_returning: bool = False) -> float:
    """Which share of all requests, or of returning ones, found their history."""
    scale = row["requests"] / max(1, row["ttft_ms"]["returning"]["n"]) if of_returning else 1
    return row["hit_rate"]["all"] * scale


def report_hits(name: str, rows: list[dict]) -> None:
    print(f"\n{name}: share of requests that found their history, in percent")
    print(f"{'case':>26} {'paper':>6} {'ours':>6} {'memory':>7} {'disk':>6} {'returning':>9} "
          f"{'device, h':>10}")
    for row in rows:
        hit = row["hit_rate"]
        returning = share_found(row, of_returning=True)
        print(f"{row['case']:>26} {HITS[name].get(row['case'], '-'):>6} {100 * hit['all']:>6.1f} "
              f"{100 * hit['dram']:>7.1f} {100 * hit['disk']:>6.1f} {100 * returning:>9.1f} "
              f"{row['device_s'] / 3600:>10.2f}")
    known = {row["case"]: row for row in rows if row["case"] in HITS[name]}
    of_returning = name == "attentionstore-fig23"
    off = max(abs(100 * share_found(row, of_returning) - HITS[name][case])
              for case, row in known.items())
    print(f"  furthest from the paper: {off:.1f} points; within 10: {'yes' if off <= 10 else 'no'}")
    if name == "attentionstore-fig21":
        aware, lru, fifo = (100 * share_found(known[f"128G/10T {policy}"])
                            for policy in ("scheduler-aware", "lru", "fifo"))
        met = aware >= 80 and aware - lru >= 20 and aware - fifo >= 30
        print(f"  at 10 TB ahead of LRU by {aware - lru:.1f} (20), of FIFO by {aware - fifo:.1f} (30): "
              f"{'yes' if met else 'no'}")


def report_speedups(rows: list[dict]) -> None:
    by_case = {row["case"]: row for row in rows}
    print("\nattentionstore-fig14 to 16: saved KV against recomputation, the paper's in brackets")
    print(f"{'model':>12} {'TTFT, lower by':>18} {'prefill':>16} {'GPU time':>16}")
    for model, (lower, prefill, gpu) in SPEEDUPS.items():
        saved, computed = by_case[f"{model} AS"], by_case[f"{model} RE"]

        def ttft(row):
            return row["ttft_ms"]["since_admitted"]["mean"]

        print(f"{model:>12} {100 * (1 - ttft(saved) / ttft(computed)):>11.0f} % ({100 * lower:.0f}) "
              f"{ttft(computed) / ttft(saved):>9.1f} ({prefill}) "
              f"{computed['device_s'] / saved['device_s']:>9.2f} ({gpu})")


def report_costs(rows: list[dict]) -> None:
    scenario = json.loads((HERE / "attentionstore-fig13.json").read_text())
    gpus = {case["name"]: case["hardware"]["gpus"] for case in scenario["cases"]}
    by_case = {row["case"]: row for row in rows}
    storage = 128 * DRAM_PRICE + 10_000 * DISK_PRICE
    print("\nattentionstore-fig17: what the workload costs, the paper's in brackets")
    print(f"{'model':>12} {'RE, $':>8} {'AS, $':>8} {'less by':>14} {'storage of AS':>18}")
    for model, (less, share) in COSTS.items():
        hours = {way: by_case[f"{model} {way}"]["device_s"] / 3600 for way in ("AS", "RE")}
        device = gpus[f"{model} AS"] * GPU_PRICE
        saved, computed = (device + storage) * hours["AS"], device * hours["RE"]
        print(f"{model:>12} {computed:>8.0f} {saved:>8.0f} "
              f"{100 * (1 - saved / computed):>6.0f} % ({100 * less:.0f}) "
              f"{100 * storage / (device + storage):>9.1f} % ({100 * share:.1f})")


def restore_ms(args: argparse.Namespace, model: str, device: str, gpus: int, ssds: int,
               history: int) -> dict[str, float]:
    """How long restoring takes by each method, by the planner's model of published hardware."""
    out = subprocess.run([args.program, "plan", "--hardware", device, "--gpus", str(gpus), "--ssd",
                          str(ssds), "-m", model, "--history", str(history), "--new", "1",
                          "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    row = json.loads(out)[0]
    times = {mode["method"]: mode["predicted"]["ttft_ms"] for mode in row["modes"]}
    return times | {"plan": row["exact"]["predicted"]["ttft_ms"], "schedule": row["exact"]["schedule"]}


def report_restores(args: argparse.Namespace) -> None:
    """Figs. 11 to 13: no load, one restore."""
    def table(title: str, paper: str, points: list[tuple]) -> None:
        print(f"\nhcache-{title}; the paper: {paper}")
        print(f"{'':>30} {'tokens/s':>9} {'kv/plan':>8} {'rec/plan':>8} {'hidden/plan':>11} "
              f"{'hybrid/plan':>11}  plan")
        for what, *point in points:
            ms = restore_ms(args, *point)
            ratios = [ms[other] / ms["plan"]
                      for other in ("kv", "recompute", "hidden", "naive-hybrid")]
            print(f"{what:>30} {1e3 * point[-1] / ms['plan']:>9.0f} {ratios[0]:>8.2f} "
                  f"{ratios[1]:>8.2f} {ratios[2]:>11.2f} {ratios[3]:>11.2f}  {ms['schedule']}")

    small = (("llama2-7b", 1), ("llama2-13b", 1))
    table("fig11a-c: devices, state in host memory, 1,024 tokens",
          "over KV 1.33 to 1.81, over recomputation 5.04 to 9.05",
          [(f"{model} {device}", model, device, gpus, 0, 1024)
           for model, gpus in (*small, ("opt-30b", 4))
           for device in ("a30", "rtx4090", "l20", "a100", "h800")
           if (model, device) not in TOO_LARGE])
    table("fig11d-f: SSDs, A100, 1,024 tokens",
          "over KV 1.7 to 2.6, over recomputation 2.3 to 6.1; with one SSD a GPU over KV 2.09 to 2.66",
          [(f"{model} {ssds} SSDs", model, "a100", gpus, ssds, 1024)
           for model, gpus in (*small, ("opt-30b", 4))
           for ssds in (gpus, 2 * gpus, 3 * gpus, 4 * gpus)])
    table("fig11g-i: history, A100, four SSDs",
          "recomputing 7B is 28 % slower a token at 16K than at 1K, KV and HCache as fast",
          [(f"{model} {history // 1024}K", model, "a100", gpus, 4, history)
           for model, gpus in (*small, ("opt-30b", 4))
           for history in (1024, 4096, 16384)])
    table("fig12: scheduling, 13B and 7B, 1,024 tokens",
          "naive hybrid 1.28 to 1.42, hidden alone 1.35 to 1.64 on skewed hardware, KV 1.45 to 2.66",
          [("balanced (A100, 4 SSDs)", "llama2-13b", "a100", 1, 4, 1024),
           ("compute-rich (A100, 1 SSD)", "llama2-13b", "a100", 1, 1, 1024),
           ("I/O-rich (7B, A30, host memory)", "llama2-7b", "a30", 1, 0, 1024)])
    ms = restore_ms(args, "llama2-13b", "a100", 1, 1, 1024)
    print(f"\nhcache-fig13: partition by tokens / by layers (13B, A100, one SSD, 1,024 tokens): "
          f"{ms['token-partition'] / ms['plan']:.2f}; the paper: 1.12, rounded 1.07")


def report_reuse(rows: list[dict]) -> None:
    print("\nhcache-fig15: shared contexts beside a KV cache on the device, mean TTFT in ms")
    print(f"{'':>10} {'resident':>8} {'plan':>8} {'kv/plan':>8} {'rec/plan':>8}")
    means = {}
    for (case, _), methods in by_point(rows).items():
        mean = {name: all_requests(row["ttft_ms"]) for name, row in methods.items()}
        means[case] = mean
        print(f"{case:>10} {100 * methods['plan']['resident_share']:>6.0f} % {mean['plan']:>8.1f} "
              f"{mean['kv'] / mean['plan']:>8.2f} {mean['recompute'] / mean['plan']:>8.2f}")
    print(f"  from no skew to 2.0 TTFT falls by a factor of "
          f"{means['uniform']['plan'] / means['skew 2.0']['plan']:.2f} (plan) to "
          f"{means['uniform']['recompute'] / means['skew 2.0']['recompute']:.2f} (recomputation)")
    print("  the paper: resident 15 % and 94 %, over KV 1.67 and 1.15, over recomputation at 2.0 1.98; "
          "falls by 3.76 to 10.03")


def all_requests(ttft_ms: dict) -> float:
    first, returning = ttft_ms["first"], ttft_ms["returning"]
    n = first["n"] + returning["n"]
    return sum(part["mean"] * part["n"] for part in (first, returning) if part["n"]) / n


def report_overlap(rows: list[dict]) -> None:
    def of_figure(number: int) -> list[dict]:
        return [row for row in rows if row["case"].startswith(f"{number}:")]

    print("\nattentionstore-fig18: prefilling 1,000 tokens, 16 at a time, in ms")
    print(f"{'saved/new':>16} {'recompute':>10} {'load':>8} {'prefill':>8} {'apart':>8} {'overlapped':>10}")
    for row in of_figure(18):
        print(f"{row['case']:>16} {row['recompute_ms']:>10.0f} {row['load_ms']:>8.0f} "
              f"{row['prefill_ms']:>8.0f} {row['no_preloading_ms']:>8.0f} "
              f"{row['preloading_ms']['0']:>10.0f}")
    [row] = of_figure(19)
    print("attentionstore-fig19: read buffer in layers: less time than without pre-loading by")
    print("  " + ", ".join(f"{layers}: {100 * (1 - ms / row['no_preloading_ms']):.0f} %"
                           for layers, ms in row["preloading_ms"].items())
          + f"; S_buf is {row['read_buffer_layers']:.1f} layers, with it "
          + f"{100 * (1 - row['prefill_ms'] / row['no_preloading_ms']):.0f} %")
    print("  the paper: 0: 35 %, 15: 61 %, which hides loading wholly")
    print("attentionstore-fig20: writing beside computing, less time by; the paper: 13 to 15 %")
    for row in of_figure(20):
        apart = row["run_ms"] + row["save_ms"]
        print(f"{row['case']:>16} run {row['run_ms']:.0f} ms, save {row['save_ms']:.0f} ms: "
              f"{100 * (1 - (row['run_ms'] + row['unsaved_ms']) / apart):.1f} %, "
              f"{row['unsaved_ms']:.1f} ms left")


def report_reload(rows: list[dict]) -> None:
    print("\ncar-fig5: time to first token with a loaded history, less than by computing it again by")
    for (case, _), methods in by_point(rows).items():
        print(f"{case:>18} {100 * (1 - ttft(methods['kv']) / ttft(methods['recompute'])):>4.0f} %")
    print("  the paper: about 30 % with long contexts, OPT-13B above 60 %")


def by_system(rows: list[dict]) -> dict:
    points: dict = {}
    for row in rows:
        points.setdefault((row["case"], row["batch"], row["prompt"]), {})[row["system"]] = row
    return points


def faster(systems: dict, one: str, other: str) -> float:
    return systems[one]["tokens_per_s"] / systems[other]["tokens_per_s"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report_batches(rows: list[dict]) -> None:
    points = by_system(rows)
    names = list(dict.fromkeys(row["system"] for row in rows))
    print("\nhybridserve-fig12: tokens/s, batch 128, 128 new tokens")
    print(f"{'model':>10} {'prompt':>6} " + " ".join(f"{name:>9}" for name in names))
    for (case, _, prompt), systems in points.items():
        print(f"{case:>10} {prompt:>6} "
              + " ".join(f"{systems[name]['tokens_per_s']:>9.2f}" for name in names))
    for system in ("hybrid", "search"):
        for other, paper in HYBRID_OVER.items():
            ratio = mean([faster(systems, system, other) for systems in points.values()])
            print(f"  {system} over {other}, mean: {ratio:.2f}; the paper: {paper:.2f}")
    ratio = mean([faster(systems, "act only", "FlexGen") for systems in points.values()])
    print(f"  act only over FlexGen, mean: {ratio:.2f}; the paper: {ACT_OVER_FLEXGEN:.2f}")
    for model, paper in HYBRID_OVER_FLEXGEN.items():
        of_model = [systems for (case, *_), systems in points.items() if case == model]
        print(f"  {model}: hybrid over FlexGen "
              f"{mean([faster(systems, 'hybrid', 'FlexGen') for systems in of_model]):.2f}; "
              f"the paper: {paper:.2f}")
    print("hybridserve-fig15: prompt 1,920, tokens/s over act only; KV : ACT; the paper's in brackets")
    for (case, _, prompt), systems in points.items():
        if prompt != 1920:
            continue
        share = systems["search"]["act_share"]
        steps = STEPS_OVER_ACT.get(case, (None, None))
        print(f"{case:>10} 1:1 {faster(systems, '1:1', 'act only'):.2f} ({steps[0] or '-'}), "
              f"policies {faster(systems, 'hybrid', 'act only'):.2f} ({steps[1] or '-'}), "
              f"search {faster(systems, 'search', 'act only'):.2f}; "
              f"KV : ACT {(1 - share) / share:.2f} ({KV_TO_ACT.get(case, '-')})")


def report_traffic(rows: list[dict]) -> None:
    points = by_system(rows)
    print("\nhybridserve-fig13: GB to the device while generating, OPT-30B")
    print(f"{'batch':>6} {'prompt':>6} {'FlexGen: weights':>16} {'KV':>7} {'hybrid: weights':>16} "
          f"{'KV':>7} {'ACT':>7} {'all':>6} {'context':>8}")
    context: dict = {}
    for (_, batch, prompt), systems in points.items():
        flexgen, hybrid = systems["FlexGen"], systems["hybrid"]
        everything = [row["weights_gb"] + row["kv_gb"] + row["act_gb"] for row in (flexgen, hybrid)]
        of_context = flexgen["kv_gb"] / max(1e-9, hybrid["kv_gb"] + hybrid["act_gb"])
        context.setdefault(batch, []).append(everything[0] / everything[1])
        print(f"{batch:>6} {prompt:>6} {flexgen['weights_gb']:>16.0f} {flexgen['kv_gb']:>7.0f} "
              f"{hybrid['weights_gb']:>16.0f} {hybrid['kv_gb']:>7.0f} {hybrid['act_gb']:>7.0f} "
              f"{everything[0] / everything[1]:>6.2f} {of_context:>8.2f}")
    for batch, paper in TRAFFIC_LESS.items():
        print(f"  batch {batch}: all traffic less by up to {max(context[batch]):.2f}; "
              f"the paper: {paper:.2f}")
    print("hybridserve-fig14: how busy computation is while generating, mean over the prompts")
    for batch in context:
        busy = [mean([systems[name]["compute_busy"] for (_, b, _), systems in points.items()
                      if b == batch]) for name in ("FlexGen", "hybrid", "search")]
        paper = "".join(f" {100 * share:.1f}" for share in BUSY.get(batch, ())) or " -"
        print(f"  batch {batch}: FlexGen {100 * busy[0]:.1f} %, hybrid {100 * busy[1]:.1f} %, "
              f"search {100 * busy[2]:.1f} %, hybrid over FlexGen {busy[1] / busy[0]:.2f}; "
              f"the paper:{paper}")


def report_tokens(rows: list[dict]) -> None:
    print("\nhybridserve-fig4: generating with a share of the context computed again, over none")
    for (case, batch, prompt), systems in by_system(rows).items():
        ratios = ", ".join(f"{name}: {row['generate_s'] / systems['0']['generate_s']:.2f}"
                           for name, row in systems.items())
        print(f"  {case}, batch {batch}, prompt {prompt}: {ratios}; "
              f"the paper, 0.5: {TOKENS_SLOWER[case]:.2f}")


def plot(name: str, rows: list[dict], folder: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    if len({row["rate"] for row in rows}) == 1:
        figure, axis = plt.subplots(figsize=(10, 4))
        for i, method in enumerate(methods):
            values = [ttft(row) for row in rows if row["method"] == method]
            axis.bar([x + 0.2 * (i - 1.5) for x in range(len(values))], values, 0.2, label=method)
        axis.set_xticks(range(len(cases)), cases, rotation=20, fontsize=7)
        axis.set_ylabel("median TTFT, ms")
        axis.set_yscale("log")
        axis.legend()
    else:
        figure, axes = plt.subplots(1, len(cases), figsize=(4 * len(cases), 3.5), squeeze=False)
        for axis, case in zip(axes.flat, cases, strict=True):
            for method in methods:
                line = [r for r in rows if r["case"] == case and r["method"] == method]
                axis.plot([r["requests_per_s"] for r in line], [ttft(r) for r in line], "o-",
                          label=method)
            axis.set_title(case)
            axis.set_xlabel("requests/s")
            axis.set_yscale("log")
        axes[0, 0].set_ylabel("median TTFT of returning requests, ms")
        axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="figures whose name contains this")
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/bin/hcache")
    parser.add_argument("--work", type=Path, default=ROOT / "build/paper", help="folder for JSON")
    parser.add_argument("--png", type=Path, help="folder for plots")
    parser.add_argument("--quick", action="store_true",
                        help="a few sessions each: proves that the script works, shows nothing")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name in PAPER:
        if args.only not in name:
            continue
        rows = simulate(args, name)
        report(name, rows)
        if args.png:
            plot(name, rows, args.png)
    if args.only in "hcache-fig11-13":
        report_restores(args)
    if args.only in "hcache-fig15":
        report_reuse(simulate(args, "hcache-fig15"))
    if args.only in "car-fig5":
        report_reload(simulate(args, "car-fig5"))
    if args.only in "attentionstore-fig18-20":
        report_overlap(simulate(args, "attentionstore-fig18"))
    for name, report_figure in {"hybridserve-fig12": report_batches,
                                "hybridserve-fig13": report_traffic,
                                "hybridserve-fig4": report_tokens}.items():
        if args.only in name:
            report_figure(simulate(args, name))
    for name in HITS:
        if not args.only or args.only not in name:
            continue
        rows = simulate(args, name)
        report_hits(name, rows)
        if name == "attentionstore-fig13":
            report_speedups(rows)
            report_costs(rows)


if __name__ == "__main__":
    main()
