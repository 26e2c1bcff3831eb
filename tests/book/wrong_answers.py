"""Wrong answers to the exercises, with what their checks say of them, and right ones that the pages don't show.

An answer is the body of a function, or changes of the solution that the page shows: (before, after), for several
changes one pair after the other. What is to be said of a wrong one stands last.
"""


def changed(program, *changes):
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    return program


REPLICAS = "dist.get_world_size(), rank)"
VIA_CPU = """
    total = sum(tensor.cpu() for tensor in data)
    for tensor in data:
        tensor.copy_(total)"""
WHOLE_RING = """
    k, own = len(data), [tensor.clone() for tensor in data]
    for _ in range(k - 1):
        own = [own[(i - 1) % k].to(data[i].device, copy=True) for i in range(k)]
        for i in range(k):
            data[i] += own[i]"""
AFTER_BACKWARD = """
    def finish():
        bucket = []
        for p in [p for p in net.parameters() if p.requires_grad][::-1]:
            bucket.append(p)
            if sum(p.grad.nbytes for p in bucket) >= bucket_mb * 2**20 or p is next(net.parameters()):
                flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
                dist.all_reduce(flat)
                for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    p.grad.copy_(mean.view_as(p))
                bucket = []
    return finish"""
RATIOS = """
    ratios = []
    for s, l in zip(small, large):
        noise = (s - l) / (1 / b - 1 / B)
        ratios.append(noise / (l - noise / B))
    return sum(ratios) / len(ratios)"""
SCALED = """norm = torch.cat([p.grad.flatten() for p in params]).norm()
        for p in params:
            p.grad.mul_(length / norm)"""
CLIP = (
    "    for params in replicas:\n        for p in params:\n            p.grad /= len(X)\n"
    "        nn.utils.clip_grad_norm_(params, length)\n"
)
REDUCE = "    for same in zip(*replicas):\n        mgpu.allreduce([p.grad for p in same])\n"
HIDDEN = "timeline.communication(0) * (1 - timeline.overlap()[0])"
MIXED = "fifty sums of 32 × 32 and three of 4096 × 4096: 'memory'"
ONE_VAR = "var = squares / n - mean**2"
TWO_PASSES = "var = sum((X - mean.to(X.device)).pow(2).sum(dim=0).to(home) for X in shards) / n"
NORMALIZED = """return [(X - mean.to(X.device)) / (var + eps).sqrt().to(X.device)
            for X in shards]"""
TWO_ONLY = "    for first, second, *rest in zip(*replicas):\n        mgpu.allreduce([first.grad, second.grad])\n"

WRONG = {
    # Meet your GPUs
    "emptiest_gpu": [
        ("max", "min", "has the least free memory"),
        ("return max(range(len(devices)), key=lambda i: torch.cuda.mem_get_info(i)[0])", "is no device"),
        ("return devices[1]", "another GPU has"),
        ("return min(devices, key=torch.cuda.memory_allocated)", "Others use this machine, too"),
        (
            "return max([torch.device(i) for i in range(torch.cuda.device_count())], key=torch.cuda.mem_get_info)",
            "one of the devices that were passed",
        ),
        (
            "return devices[max(range(len(devices)), key=lambda i: torch.cuda.mem_get_info(i)[0])]",
            "need not be GPU i",
        ),
    ],
    "visible_gpus": [
        ("or int(entry) >= installed", "", "numbered from 0 to 3"),
        ("numbers.append(int(entry))", "numbers.append(entry)", "turn them into numbers"),
        ("break", "continue", "everything is dropped"),
        ("if len(set(numbers)) == len(numbers) else []", "", "named twice"),
        ("return numbers if", "return sorted(numbers) if", "in the order of the list"),
        ("list(range(installed))", "[]", "nothing is hidden"),
    ],
    "best_pair": [
        ("10 + int(code[2:])", "10", "NV2 is better than NV1"),
        ("int(code[2:])", "int(code[2])", "NV12 is better than NV2"),
        ("range(i + 1, n)", "range(n)", "X"),
        ("(i, j) for", "[i, j] for", "no tuple"),
        ('"SYS", "NODE", "PHB", "PXB", "PIX"', '"PIX", "PXB", "PHB", "NODE", "SYS"', "is better than"),
    ],
    "break_even_ms": [
        ("2 * megabytes", "megabytes", "is the transfer"),
        ("2 * megabytes / gbps", "2e-3 * megabytes / gbps", "in seconds"),
        ("2 * megabytes", "4 * megabytes", "equally long"),
    ],
    # Tensors on devices
    "to_device": [
        ("return nest.to(device) if isinstance(nest, torch.Tensor) else nest", "the caller's list"),
        ("return nest.to(device)", "return nest.to(device).clone()", "needs no copy"),
        ("type(nest)(to_device(value, device) for value in nest)", "[to_device(x, device) for x in nest]", "as list"),
        ("(to_device(value", "((lambda x, d: x.to(d) if isinstance(x, torch.Tensor) else x)(value", "moved"),
    ],
    "weighted_step": [
        (".detach()", ".item()", "waits once"),
        ("total + loss.detach()", "total.item() + loss.item()", "keep the sum on the GPU"),
        ("X.to(device, non_blocking=True)", "X.cuda()", "cuda:0"),
        ("X.to(device, non_blocking=True)", "X.to(device)", "waits once"),
        ("loss.detach()", "loss", "add loss.detach()"),
        ("    loss.backward()\n", "", "call backward"),
        ("(weights * losses)", "losses", "the gradient has changed"),
        ("len(X), device=device)", "len(X))", "all tensors to be on the same device"),
    ],
    "copy_ms": [
        ("1e3 * nbytes", "nbytes", "that is in seconds"),
        (" * itemsize", "", "itemsize bytes"),
        ("pixels * pixels", "pixels", "high and"),
        ("1e3 * nbytes", "8e3 * nbytes", "not gigabits"),
        ("1e9", "2**30", "10**9"),
    ],
    # What fills the memory
    "mlp_bytes": [
        ("(inputs + 1) * outputs", "inputs * outputs", "the biases are parameters, too"),
        ("sum(widths[1:])", "sum(widths)", "the batch itself doesn't count"),
        ("sum(widths[1:])", "sum(widths[1:-1])", "the logarithms of the probabilities"),
        ("sum(widths[1:])", "(sum(widths[1:]) + sum(widths[1:-1]))", "its input is freed"),
        ("16 *", "12 *", "sixteen bytes"),
        ("16 *", "4 *", "gradients and Adam's moments are missing"),
        ("4 * batch", "0 * batch", "activations are missing"),
        ("16 * parameters + 4 * batch", "4 * parameters + batch", "each takes four bytes"),
        ("16 *", "14 *", "it is "),
    ],
    "accumulate": [
        ("(loss / len(X)).backward()", "(loss / len(X_piece) / len(X.split(size))).backward()", "count too much"),
        ("(loss / len(X))", "(loss / len(X_piece))", "several times too long"),
        ("        (loss / len(X))", "        if len(X_piece) == size or len(X) < size: (loss / len(X))", "are missing"),
        ("F.cross_entropy(net(X), y).backward()", "saw 12 rows at once"),
        ("net(X)", "some gradients are missing"),
        ("(loss / len(X))", "loss", "the gradients are wrong"),
    ],
    "mended_step": [
        ("    optimizer.zero_grad()\n", "", "still has the gradients of the first"),
        ("share = len(X_piece) / len(X)", "share = 1 / len(X.split(size))", "unequal size count as equal"),
        ("    scaler.unscale_(optimizer)\n", "", "clipping sees scaled gradients"),
        (
            ".backward()\n",
            ".backward()\n        nn.utils.clip_grad_norm_(net.parameters(), bound)\n",
            "    nn.utils.clip_grad_norm_(net.parameters(), bound)\n    scaler.step",
            "    scaler.step",
            "each piece is clipped, not their sum",
        ),
        (
            "    optimizer.zero_grad()\n",
            "",
            "    scaler.unscale_(optimizer)\n",
            "",
            "clipping sees scaled gradients; the second step still has",
        ),
        ("    nn.utils.clip_grad_norm_(net.parameters(), bound)\n", "", "not those of a right step"),
        ("    scaler.step(optimizer)", "    optimizer.step()", "the step was taken all the same"),
        ("    scaler.update()\n", "", "unscale_() is being called after step()"),
        (
            "scaler.unscale_(optimizer)",
            "[p.grad.div_(scaler.get_scale()) for p in net.parameters()]",
            "scaler.step(optimizer)\n    scaler.update()",
            "optimizer.step()",
            "it learns from scaler.update()",
        ),
    ],
    # Data parallelism from scratch
    "accuracy_of_each": [
        ("devices)]", "devices)][0]", "for 3 replicas: return a list"),
        ("devices)]", "devices)][::-1]", "belongs at place i"),
        ("zip(device_params, devices)", "[(device_params[0], devices[0])] * len(devices)", "the same replica each"),
        ("X, y, device)", "X[::2], y[::2], device)", "no shards"),
        ("[mgpu", "[100 * mgpu", "between 0 and 1"),
    ],
    "ring_allreduce": [
        ("data[:] = [sum(t.to(own.device) for t in data) for own in data]", "still has its own numbers"),
        ("mgpu.allreduce(data)", "sends to GPU 0; in a ring"),
        (WHOLE_RING, "Send one chunk in each round"),
        ("range(k - 1):  # and", "range(0):  # and", "others?"),
        (VIA_CPU, "from the CPU. Send from GPU to GPU"),
    ],
    "is_wrong": [
        ("<= 1e-5", "<= 0", "let gaps of rounding pass"),
        ("2 * k + 1", "2 * k", "averages the means of the shards"),
        ("2 * [", "[", "never zeroes the gradients"),
        ("*replicas", "replicas[0]", "trains GPU 0 with the whole batch"),
        ("return False", "leaves the others as they are"),
    ],
    "uneven_weights": [
        ("return [1 / len(sizes)] * len(sizes)", "equal weights are right for equal shards only"),
        ("in sizes]", "in sizes][:1]", "one weight for each shard"),
        (" / sum(sizes)", "", "not to 1"),
        ("size / sum(sizes)", "(1 / (size + 1)) / sum(1 / (n + 1) for n in sizes)", "as much as any other"),
    ],
    # DataParallel
    "in_parallel": [
        (
            "devices[:len(parts)]",
            "devices",
            "outputs = parallel_apply(replicas, parts, devices=used)",
            "outputs = parallel_apply(replicas[:len(parts)], parts, devices=used[:len(parts)])",
            "it needs no replica",
        ),
        (", devices=used)", ")", "tell parallel_apply the devices"),
        ("gather(outputs, devices[0])", "gather(outputs, devices[-1])", "not on the first GPU"),
        ("gather(outputs, devices[0])", "outputs", "and not a list"),
        ("gather(outputs, devices[0])", "gather(outputs[::-1], devices[0])", "isn't that of module(X)"),
        ("gather(outputs, devices[0])", "gather(outputs, devices[0]).detach()", "no gradient finds its way back"),
        ("return module(X.to(devices[0]))", "scatter gives [2, 2, 2, 2]"),
    ],
    "broadcast_backward": [
        ("grad.to(device) for", "grad.to(device).sum() for", "the gradient has shape (), the parameter (2,)"),
        ("sum(arrived)", "sum(arrived) / len(arrived)", "don't average"),
        ("sum(arrived)", "arrived[0]", "other replicas' rows"),
        ("sum(arrived)", "sum(arrived[1:], arrived[0])", "gradients [5.0]: you return the replica's own tensor"),
        ("to(device)", "to('cuda:1')", "is on cuda:1"),
        (
            "return sum(arrived)",
            "for grad in arrived[1:]:\n        arrived[0] += grad\n    return arrived[0]",
            "grads[0] was changed",
        ),
    ],
    "step_bytes": [
        ("(k - 1)", "k", "sends nothing to itself"),
        ("2 * params", "params", "gradients of the parameters"),
        ("+ buffers", "+ 2 * buffers", "one way"),
        ("2 * outputs", "outputs", "gather's backward"),
        ("(inputs", "(2 * inputs", "need no gradient"),
        (" // k", "", "a k-th of the inputs"),
        (" + buffers + (inputs + 2 * outputs) // k", "", "the ledger counts"),
    ],
    "refused": [
        ("part = -(-rows // k)", "part = rows // k + 1", "look again at"),
        ("return [n for n in range(1, most + 1) if n % k == 1]", "not rows % k"),
        ("return [n for n in range(1, most + 1) if n < 2 * k]", "so it is with tensor_split"),
        ("part == 1 or ", "", "look again at"),
    ],
    "row_losses": [
        (" + 0.1 * H.mean(dim=1)", "", "The penalty is missing"),
        ("0.1 * H", "H", "counts a tenth"),
        ("return losses + 0.1 * H.mean(dim=1)", "return losses.mean() + 0.1 * H.mean()", "a mean of means"),
        (
            "return losses + 0.1 * H.mean(dim=1)",
            "return (losses.mean() + 0.1 * H.mean()).reshape(1)",
            "a mean of means",
        ),
        ("0.1 * H.mean", "0.1 * H.detach().mean", "not its gradient"),
        ("losses + 0.1 * H.mean(dim=1)", "(losses + 0.1 * H.mean(dim=1)).detach()", "needs a gradient"),
    ],
    "sync_batch_norm": [
        ("n = sum(len(X) for X in shards)", "n = len(shards[0]) * len(shards)", "as on one device"),
        (
            "sum(X.sum(dim=0).to(home) for X in shards) / n",
            "sum(X.mean(dim=0).to(home) for X in shards) / len(shards)",
            "a mean of the shards' means",
        ),
        (
            "sum(X.sum(dim=0).to(home) for X in shards) / n",
            "sum(X.mean(dim=0).to(home) for X in shards) / len(shards)",
            ONE_VAR,
            "var = sum(X.var(dim=0, correction=0).to(home) for X in shards) / len(shards)",
            "too much: add sums and counts; a mean of the shards' own variances",
        ),
        (
            ONE_VAR,
            "var = sum(len(X) * X.var(dim=0, correction=0).to(home) for X in shards) / n",
            "a mean of the shards' own variances",
        ),
        (
            NORMALIZED,
            "return [F.batch_norm(X, None, None, training=True, eps=eps) if len(X) > 1 else X - X for X in shards]",
            "with its own mean, as without any exchange; each shard is divided by its own spread",
        ),
        ("squares / n - mean**2", "(squares - n * mean**2) / max(n - 1, 1)", "n - 1 is for running_var only"),
        (" - mean**2", "", "subtract the square of the mean"),
        (" + eps).sqrt()", ").sqrt()", "eps is missing"),
        ("(var + eps).sqrt()", "(var.sqrt() + eps)", "eps belongs under the root"),
        ("var * n / (n - 1)", "var", "over n - 1"),
        ("running_mean.lerp_(mean, momentum)", "running_mean.lerp_(mean, 1 - momentum)", "the weight of the new batch"),
        (
            "running_mean.lerp_(mean, momentum)\n        running_var.lerp_(var * n / (n - 1), momentum)",
            "running_mean = mean\n        running_var = var",
            "in place",
        ),
        ("running_mean.lerp_(mean, momentum)", "running_mean.lerp_(shards[0].mean(0), momentum)", "statistics are not"),
        ("with torch.no_grad():", "if True:", "have a history"),
        ("    mean = sum", "    shards = [X.detach() for X in shards]\n    mean = sum", "not the gradient"),
        ("X in shards]", "X in shards][:1]", "you return 1 of them"),
        ("    mean = sum", "    shards = [X.to(home) for X in shards]\n    mean = sum", "was on cuda:1, now on cuda:0"),
        (
            "    mean = sum",
            "    away, shards = shards, [X.to(home) for X in shards]\n    mean = sum",
            NORMALIZED,
            "return [((X - mean) / (var + eps).sqrt()).to(Y.device) for X, Y in zip(shards, away)]",
            "send sums, not rows",
        ),
    ],
    "find_dots": [
        ("net.to(devices[0])", "net", "must have its parameters and buffers on device"),
        ("y.to(devices[0])", "y", "on the same device"),
        ("            optimizer.zero_grad()\n", "", "all earlier steps"),
        ("        scheduler.step()\n", "", "never halved"),
        ("optimizer, 2, gamma", "optimizer, 1, gamma", "after every epoch"),
        (", gamma=0.5", "", "default of gamma"),
        (
            "        scheduler.step()\n",
            "        if epoch % 2 == 0:\n            optimizer.param_groups[0]['lr'] *= 0.5\n",
            "too early",
        ),
        ("return net.state_dict()", "return parallel.state_dict()", "begin with 'module.'"),
        ("return net.state_dict()", "return net", "and not a Sequential"),
        ("for epoch in range(epochs)", "for epoch in range(0)", "nothing was learned"),
        ("for epoch in range(epochs)", "for epoch in range(epochs - 1)", "aren't those of the same training"),
    ],
    # Where the time goes
    "bottleneck": [
        (HIDDEN, 'bound.get("link", 0)', "Only the communication that overlap() doesn't hide"),
        ("return max(timeline.bound_by(0), key=timeline.bound_by(0).get)", "'fixed' is none of"),
        ("max(costs, key=costs.get)", "max(costs.values())", "is none of"),
        (HIDDEN, "0", "and the times are"),
        (HIDDEN, 'bound.get("link", 0) if timeline.overlap()[0] < 0.5 else 0', "hide only 55% of the copies"),
        (
            HIDDEN,
            'bound.get("link", 0) if timeline.overlap()[0] < 0.6 else 0',
            "wait for the copies: 'link'",
        ),
        ("timeline.waiting_for_host(0) + ", "", MIXED),
    ],
    "first_to_fix": [
        ("max(parts, key=idle)", 'max(parts, key=lambda part: part["dur"])', "takes the host longest"),
        ('             and not event["name"].startswith("Profiler")]', "]", "the whole step"),
        ('["name"]\n', "\n", "is no range of the host"),
    ],
    "step_seconds": [
        ("            torch.cuda.synchronize(device)\n", "            pass\n", "a GPU is still at work"),
        ("for device in devices:", "for device in devices[:1]:", "GPU 1 is still at work"),
        ("for device in devices:", "for device in devices[-1:]:", "GPU 0 is still at work"),
        ("start = done()", "start = now()", "pays for what is left of the warm-up"),
        ("statistics.median", "statistics.mean", "that is the mean"),
        ("statistics.median", "max", "the slowest call"),
        ("statistics.median", "sum", "of all five calls"),
        ("range(2)", "range(0)", "called 5 times"),
    ],
    "gain_without_host": [
        ("return step.seconds / (step.seconds - waits)", "return (step.seconds - waits) / step.seconds", "is longer"),
        ("return step.seconds / (step.seconds - waits)", "return 1 + waits / step.seconds", "not a share"),
        ("return step.seconds / (step.seconds - waits)", "return step.seconds / waits", "only its waiting"),
        ("step.seconds / (step.seconds - waits)", "step.seconds / step.timeline.busy(0)", "waits for another GPU"),
    ],
    "epoch_loss": [
        ("        total += loss.detach()\n", "        total += loss.item()\n", "reads a value from the GPU 7 times"),
        ("optimizer.step()\n", "optimizer.step()\n        torch.cuda.synchronize()\n", "is called 6 times"),
        (", non_blocking=True), y.to(device, non_blocking=True)", "), y.to(device)", "the host waits for 12 copies"),
        ("return total.item() / len(batches)", "return total / len(batches)", "return a float, not a Tensor"),
        ("return total.item() / len(batches)", "return total.item()", "the mean loss is"),
        ("total += loss.detach()", "total = total + loss", "the graphs of 5 steps are kept"),
    ],
    # How far to trust the clock
    "order_holds": [
        ("second / (1 + b)", "second", "the second is faster"),
        ("first / (1 + a) < second / (1 + b)", "first * (1 - a) < second * (1 - b)", "1 / 0.8 real seconds"),
        ("return sum(right) / len(pairs)", "return str(sum(right))", "Return a number from 0 to 1"),
    ],
    # Batch size and learning rate
    "died_at": [
        ("not math.isfinite(loss) or ", "", "the run that becomes NaN may be ended after step 3, you say -1"),
        ("not math.isfinite(loss)", "math.isnan(loss)", "no less final than NaN"),
        ("not math.isfinite(loss)", "not loss < 100", "jumps once may not be ended, you say 1: however large"),
        (" or (rows == rows[0]).all()", "", "from step 4 on all images get the same logits"),
        ("(rows == rows[0]).all()", "(rows[1] == rows[0]).all()", "learns may not be ended, you say 0"),
        ("(rows == rows[0]).all()", "len(set(rows.argmax(1).tolist())) == 1", "all its images get the same class"),
        ("(rows == rows[0]).all()", "abs(loss - math.log(10)) < 1e-4", "the loss alone doesn't tell"),
        ("(rows == rows[0]).all()", "rows.std() < 0.1", "the loss alone doesn't tell"),
        ("return -1", "return 'never'", "return the number of a step, or -1"),
    ],
    "seeds_needed": [
        ("first[seed] - second[seed]", "second[seed] - first[seed]", "the wrong sign"),
        (
            "[first[seed] - second[seed] for seed in first]",
            "[a - b for a, b in zip(first.values(), second.values())]",
            "match them by key",
        ),
        (" / math.sqrt(n)", "", "the spread of single seeds"),
        ("evidence.STUDENT[n - 2] * deviation", "deviation", "multiply it by Student's factor"),
        ("evidence.STUDENT[n - 2]", "1.96", "1.96 is for very many seeds"),
        ("statistics.stdev", "statistics.pstdev", "divide the squares by n - 1"),
        (
            "evidence.STUDENT[n - 2] * deviation",
            "evidence.STUDENT[n - 2] * math.hypot(*map(statistics.stdev, (first.values(), second.values())))",
            "ignores the pairs",
        ),
        ("math.ceil((2 * deviation / 0.5) ** 2)", "(2 * deviation / 0.5) ** 2", "round up"),
        ("(2 * deviation / 0.5) ** 2", "2 * deviation / 0.5", "divided by the root of their number"),
        ("return statistics.fmean(differences), half, needed", "return half", "return three numbers"),
    ],
    "mended_comparison": [
        ("evidence.best_rate(grid[B], ", "evidence.best_rate(grid[second], ", "tuned for one batch only"),
        (
            'evidence.best_rate(grid[B], "epochs")',
            'max(grid[B], key=lambda lr: evidence.tested(grid[B][lr], "epochs")[0])',
            "the test images chose a rate",
        ),
        (
            "return evidence.paired(new, old)",
            """
    from statistics import fmean, stdev
    new, old = ([each for each in side.values() if each is not None] for side in (new, old))
    return fmean(new) - fmean(old), 4.3 * ((stdev(new) ** 2 + stdev(old) ** 2) / 3) ** 0.5""",
            "compare seed by seed",
        ),
        (
            "return evidence.paired(new, old)",
            """
    from statistics import fmean
    found = [fmean(each for each in side.values() if each is not None) for side in (new, old)]
    return found[0] - found[1], evidence.paired(new, old)[1]""",
            "leave it out on both sides",
        ),
        ("return evidence.paired(new, old)", "return evidence.paired(new, old)[0]", "return two numbers"),
        ("return evidence.paired(new, old)", "return evidence.paired(new, old)[0], 0.0", "gains lie a point apart"),
    ],
    # How large a batch pays
    "critical_batch": [
        ("return E_min / S_min", "return E_min", "the fewest images. Divide by S_min"),
        ("return E_min / S_min", "return S_min", "E_min / S_min is asked for"),
        ("return E_min / S_min", "return S_min / E_min", "turn it round"),
        (", w=[1 / s for s in S]", "", "do they decide alone?"),
        ("B, S = list(steps), list(steps.values())\nreturn B[0] * (S[0] / S[-1] - 1)", "less than the steps of the"),
    ],
    "two_batch_noise": [
        ("noise / signal", "signal / noise", "that is signal over noise"),
        ("noise / signal", "noise / large", "the large batch has noise too"),
        ("noise / signal", "noise", "that is tr Σ"),
        ("noise / signal", "(small - large) / signal", "small - large is tr Σ"),
        (RATIOS, "Take the means of the lengths first"),
    ],
    "best_batch": [
        ("c * B / k", "c * B", "an image costs c / k"),
        ("B_crit * t0 * k / c", "B_crit * t0 / c", "grows with the root of k"),
        (
            "max(1, math.floor(math.sqrt(B_crit * t0 * k / c) / k))",
            "math.sqrt(B_crit * t0 * k / c) / k",
            "whole images",
        ),
        ("min(below * k, (below + 1) * k, key=seconds)", "below * k", "need not be the faster one"),
        ("max(1, math.floor(", "(math.floor(", "division by zero"),
        (
            "min(below * k, (below + 1) * k, key=seconds)",
            "k * max(1, round(math.sqrt(B_crit * t0 * k / c) / k))",
            "need not be the faster one",
        ),
    ],
    "rescale": [
        ('["lr"] *= math.sqrt(k)', '["lr"] *= k', "That is SGD's rule"),
        ('        group["lr"] *= math.sqrt(k)\n', "", "it grows by √k"),
        ("= beta1,", "= beta1**k,", "leave it alone"),
        ("max(beta2**k, 0.9)", "beta2**k", "below the floor of 0.9"),
        ("max(beta2**k, 0.9)", "beta2", "beta2 is 0.999 instead of 0.996006"),
        ('        group["weight_decay"] *= math.sqrt(k)\n', "", "each step shrinks the weights by"),
        ('["weight_decay"] *= math.sqrt(k)', '["weight_decay"] += 0.1', "this group had none"),
        ('["initial_lr"] *= math.sqrt(k)', '["initial_lr"] *= 1', "a new scheduler should begin"),
    ],
    # DistributedDataParallel
    "mended_script": [
        (REPLICAS, "torch.cuda.device_count(), local_rank)", "What did the second machine get to do?"),
        (REPLICAS, "dist.get_world_size(), local_rank)", "16 of 32 images are never looked at"),
        (REPLICAS, "torch.cuda.device_count(), rank)", "your code raises ValueError: Invalid rank 2"),
        ("set_device(local_rank)", "set_device(rank)", "rank 2 asks for a GPU that isn't there"),
        ("    torch.cuda.set_device(local_rank)\n", "", "rank 1 works on GPU 0 of its machine, and its own is 1"),
        ("        sampler.set_epoch(epoch)\n", "", "every epoch has the same order"),
        (", sampler=sampler", ", shuffle=True", "64 images are looked at in an epoch, and there are 32"),
        ("    dist.destroy", "    if rank == 0: dist.all_reduce(X.cuda())\n    dist.destroy", "wait for each"),
        ("DistributedDataParallel(mgpu.lenet_module().cuda())", "mgpu.lenet_module().cuda()", "calls no collective"),
        ("return 1", "rank 0 never looks at the data"),
    ],
    "bucketed": [
        ("        flat /= dist.get_world_size()\n", "", "is the sum of all ranks'"),
        ("        traveling.clear()\n", "", "forget what has come"),
        ("            work.wait()\n", "", "this rank's own, divided by the number of ranks"),
        ("        if bucket:\n            send()\n", "", "What is left in a bucket"),
        (">= bucket_mb", "> 1e9 * bucket_mb", "buckets of [1728] bytes are sent instead of [576, 576, 576]"),
        (">= bucket_mb", ">= 0 * bucket_mb", "one for each gradient"),
        ("p.grad.copy_(mean.view_as(p))", "pass", "still this rank's own"),
        ("        bucket.clear()\n", "", "bytes are sent, and there are 1728"),
        (", async_op=True", "", "call it with async_op=True"),
        ("if p.requires_grad", "if True", "your code raises RuntimeError: cannot register a hook"),
        (AFTER_BACKWARD, "use hooks"),
    ],
    "best_cap": [
        ("return max(caps)", "A large bucket waits for its last gradient"),
        (" + latency", "", "Every bucket pays the latency"),
        ("ready[i]) + latency + held / bandwidth", "ready[i] + latency + held / bandwidth)", "all-reduces take turns"),
    ],
    "missing_rank": [
        (
            "return min(dumps, key=lambda rank: len(dumps[rank])), 43 + 2 * (len(dumps) == 3)",
            "A short list may only mean",
        ),
        (
            "return rank, number",
            "return rank, number - 1",
            "it is, but the first collective at which it is missing is 43",
        ),
        (
            "list(names.values()).count(name) == 1",
            "name is None",
            "rank 2 calls another one: (1, 47) instead of (2, 45)",
        ),
        (
            "return rank, number",
            "return rank, number + (number == 44)",
            "rank 1 it is, but the first collective at which it is missing is 44",
        ),
        (
            "if max(records[first]) < number:",
            "if False:",
            "rank 1 has left, others keep few: rank 1 it is, but the first collective at which it is missing is 42",
        ),
    ],
    # Splitting a network
    "best_cuts": [
        ("return [0] * (stages - 1)", "without layers"),
        ("return list(range(1, stages + 1))", "too few cuts or too many"),
        ("return busiest, ", "return ", "Work comes first"),
        ("outputs[cut - 1]", "outputs[cut]", "What crosses a cut after c layers is outputs[c - 1]"),
        ("return busiest, sum(outputs[cut - 1] for cut in cuts)", "return busiest", "are sent, not 2"),
        (
            "    cuts, total = [], 0\n    for layer, more in enumerate(work):\n"
            "        if total and total + more > sum(work) / stages and len(cuts) < stages - 1:\n"
            "            cuts, total = [*cuts, layer], 0\n        total += more\n    return cuts",
            "what fills one stage is missing in the next",
        ),
    ],
    "step_time": [
        (
            "return sum((forward[r] + backward[r]) * len(orders[r]) // 2 for r in range(len(orders)))",
            "at the same time",
        ),
        ("max(free[rank], ends.get((giver, name), 0))", "free[rank]", "needs F0 of rank 0"),
        ("max(free[rank], ends.get((giver, name), 0))", "ends.get((giver, name), 0)", "a single rank never waits"),
        ("rank - 1 if forth else rank + 1", "rank - 1", "B0 of rank 0 needs B0 of rank 1"),
        ("(forward if forth else backward)", "forward", "8 instead of 10: a single rank never waits"),
        ("return max(free)", "return free", "list instead of a number"),
    ],
    "one_f_one_b": [
        (
            "return [f'{kind}{i}' for kind in 'FB' for i in range(micro_batches)]",
            "rank 0 of 4, 8 micro-batches: after F4 it holds the activations of 5 micro-batches; 1F1B needs no more "
            "than 4",
        ),
        (
            "return [f'{kind}{i}' for i in range(micro_batches) for kind in 'FB']",
            "4 ranks and 8 micro-batches: your orders take 96 slots, and 33 are possible",
        ),
        ("return [f'F{i}' for i in range(micro_batches)]", "should hold each of B0, B1"),
        ("return [f'{kind}{i}' for i in range(micro_batches) for kind in 'BF']", "B0 comes before F0"),
        (
            "return [f'{kind}{i}' for i in list(range(micro_batches))[:: (-1) ** rank] for kind in 'FB']",
            "nobody can go on: rank 0 waits for B0, rank 1 waits for F7",
        ),
    ],
    "norm_tokens": [
        ("f.apply(weight)", "weight", "its own tokens only"),
        ("F.rms_norm(X,", "F.rms_norm(f.apply(X),", "no other rank has these tokens"),
        ("f.apply(weight)", "f.apply(f.apply(weight))", "isn't that of one device"),
        ("f.apply(weight)", "g.apply(weight)", "doesn't have F.rms_norm"),
        ("f.apply(weight)", "(f.apply(weight) + weight.detach()) / 2", "the ranks' mean"),
        ("f.apply(weight)", "weight.detach()", "weight gets no gradient"),
        ("return", "dist.all_reduce(torch.zeros(9))\n    return", "one all-reduce of the weight's 4 is enough"),
    ],
    "scatter_tokens": [
        ("return Y.split(lengths, 1)[dist.get_rank()]", "not the sum over all ranks"),
        ("return g.apply(Y)", "its output should be"),
        ("return g.apply(Y).split(lengths, 1)[dist.get_rank()]", "is wrong on rank 0"),
        ("torch.cat(pieces, dim=1), None", "len(pieces) * torch.cat(pieces, dim=1), None", "2 times too large"),
        ("return Scatter.apply(Y, lengths)", "return Scatter.apply(Y, lengths).detach()", "Y gets no gradient"),
        ("return Scatter.apply(Y, lengths)", "return 2 * Scatter.apply(Y, lengths)", "its tokens of the sum"),
        (
            "        dist.reduce_scatter(mine, pieces)",
            "        mine = Y.clone()\n        dist.all_reduce(mine)\n"
            "        mine = mine.split(lengths, 1)[dist.get_rank()]",
            "brings it its own tokens only",
        ),
    ],
    "vocabulary_loss": [
        ("    dist.all_reduce(most, dist.ReduceOp.MAX)\n", "", "subtract the same maximum"),
        ("logits.detach().amax(-1)", "0 * logits.detach().amax(-1)", "subtract the maximum before"),
        ("g.apply(mine.masked_fill(elsewhere, 0))", "g.apply(mine)", "come from the rank that has it"),
        (").mean()", ").sum()", "not their mean"),
        (").mean()", ")", "return the mean over all tokens"),
        ("total.log() - target).mean()", "total.log() - target).mean().detach()", "logits get no gradient"),
        (
            "    return (most + total.log() - target).mean()",
            "    from mgpu_lib.tensor_parallel import f\n    return f.apply((most + total.log() - target).mean())",
            "2 times too large",
        ),
        (
            "    most = logits",
            "    from mgpu_lib.tensor_parallel import f\n    logits = f.apply(logits)\n    most = logits",
            "gradient of rank 0's logits isn't",
        ),
        ("    column =", "    dist.all_reduce(torch.zeros(6, 8))\n    column =", "three per token are enough"),
    ],
    "where_to_look": [
        ("return gaps[0]", "not a tuple"),
        ("1e-12", "1e-16", "all gaps are rounding"),
        ("max(gap) >", "gap[0] >", "rank 1's gradients are wrong up to embedding"),
        ("max(gap) >", "min(gap) >", "you say 'nowhere'"),
        ("last = max(", "last = min(", "you say 'behind embedding' instead of 'behind norm'"),
        ("last > 0 and ", "", "you say 'in embedding'"),
        ('"in" if last > 0 and not wrong[last - 1] else ', "", "a right one went through it to embedding"),
        ("not wrong[last - 1]", "not any(wrong[:last])", "up is nearer to the loss"),
        ("not wrong[last - 1]", "not wrong[0]", "just before it, is right"),
    ],
    # Sharding
    "hidden_from": [
        (" * kv_heads / heads", "", "the messages those of `kv_heads`"),
        (" * kv_heads / heads", " * heads / kv_heads", "the more products there are to each message"),
        ("blocks = 2 if causal else 4", "blocks = 4", "two of a step's four blocks"),
        ("blocks = 2 if causal else 4", "blocks = 2", "without a mask all four blocks"),
        ("2 * 2 + (2 * 4 if backward else 0)", "2 + (2 * 4 if backward else 0)", "both keys and values travel"),
        ("2 * 2 + (2 * 4 if backward else 0)", "2 * 2", "with them their gradients"),
        ("products = 5 if backward else 2", "products = 2", "five products"),
        ("return sent", "return 3 * sent", "tokens instead of"),
    ],
    "balanced": [
        (
            """
    pieces = torch.arange(sum(lengths)).chunk(2 * ranks)
    return [pieces[r].tolist() + pieces[-1 - r].tolist() for r in range(ranks)]""",
            "fair only to a single document",
        ),
        ("return [part.tolist() for part in torch.arange(sum(lengths)).chunk(ranks)]", "has most to do"),
        ("return [list(range(r, sum(lengths), ranks)) for r in range(ranks)]", "Dealt out one by one"),
        ("start += length", "start += 0", "must be with one rank, and only once"),
        ("return shares", "return shares[:1]", "instead of one for each rank"),
        ("shares[r] += pieces[r] + pieces[-1 - r]", "shares[0] += pieces[r] + pieces[-1 - r]", "must have one size"),
    ],
    "forward_bytes": [
        ("2 * kv_heads * head\n", "2 * heads * head\n", "only queries have `heads`"),
        ("(ranks - 1) * 2 * kv_heads", "(ranks - 1) * kv_heads", "Both keys and values travel"),
        ("(ranks - 1) * 2 * kv_heads", "ranks * 2 * kv_heads", "makes ranks - 1 hops"),
        ("head = 2 * tokens // ranks * width", "head = 2 * tokens * width", "tokens / ranks of the text"),
        ("    if kv_heads % ranks:\n        return math.inf\n", "", "A head can't be cut"),
        ("kv_heads % ranks:", "ranks > kv_heads:", "6 ranks, 8 heads of keys"),
        (" * (ranks - 1) / ranks", "", "stays at home"),
        ("(2 * heads + 2 * kv_heads)", "2 * kv_heads", "queries and outputs are swapped, too"),
        ("(2 * heads + 2 * kv_heads)", "(heads + 2 * kv_heads)", "four tensors are swapped"),
    ],
    "ranks_needed": [
        ("return 16 * parameters // memory", "round up"),
        ("return -(-16 * parameters // memory)", "which stay whole on every GPU"),
        (" if memory > whole else math.inf", "", "however many there are"),
        ("16 * parameters - whole", "16 * parameters", "Solve (bytes that stay whole)"),
    ],
    "on_gradient": [
        ("    if any(p.grad is None for p in unit.params):\n        return\n", "", "isn't there yet"),
        (" / unit.ranks", "", "divide by the number of ranks"),
        ("unit.joined([p.grad for p in unit.params])", "torch.cat([p.grad.flatten() for p in unit.params])", "zeros"),
        ("for p in unit.params]) /", "for p in unit.params[::-1]]) /", "in the order of `unit.params`"),
        ("unit.shard.grad += mean", "unit.shard.grad = mean", "The first pass's gradient is lost"),
        ("unit.shard.grad = mean", "pass", "The shard has no gradient"),
        ("    for p in unit.params:\n        p.grad = None\n", "", "Whole gradients are left"),
    ],
    "fsdp_bytes": [
        (" * (k - 1) / k", "", "one part is its own"),
        ("* 4 * parameters", "* parameters", "has 4 bytes"),
        ("else 2 * passes", "else passes", "the backward pass gathers them again"),
        ("1 if keep", "passes if keep", "need not be gathered again"),
        ("passes if sync else 1\n", "passes\n", "name each collective"),
        ("(k if sync else 1)", "k", "how much of the gradient is"),
        ("(k if sync else 1)", "1", "A shard of the gradient"),
        ("return sent, gradients + gathered", "return sent, gradients", "The gathered parameters are there, too"),
        ("return sent, ", "return sent\n    ", "Return two numbers"),
    ],
    "logged_norm": [
        ("return net.head.weight.full_tensor().norm() if rank == 0 else None", "waits forever"),
        ("return net.head.weight.to_local().norm() if rank == 0 else None", "only its own rows"),
        ("return net.head.weight.norm().full_tensor()", "returns None"),
        (".norm().full_tensor()", ".full_tensor()", "instead of one number"),
        (".norm()", ".square().sum()", "the norm is 8, and rank 0 returns 64"),
    ],
    "pieces": [
        ("size = -(-rows // ranks)", "size = rows // ranks", "rounded up"),
        ("return found", "return found[0]", "Return a list"),
        ("return found", "return found[::-1]", "in the order of the rows"),
        ("append((other,", "append((rank,", "Row 3 isn't in the file of rank 0"),
        (
            "        if common:\n            found.append((other, common[0], len(common)))\n",
            "        found.append((other, *(common or [0])[:1], len(common)))\n",
            "need not be opened",
        ),
    ],
    # Jobs that survive
    "resumable": [
        ("if checkpoint is not None", "if False", "the run starts over"),
        ('        net.load_state_dict(checkpoint["net"])\n', "", "the parameters that it had"),
        ('        optimizer.load_state_dict(checkpoint["optimizer"])\n', "", "What does the optimizer remember"),
        ('        scheduler.load_state_dict(checkpoint["scheduler"])\n', "", "Which learning rate comes next"),
        ('        torch.set_rng_state(checkpoint["random"])\n', "", "dropout draws different random numbers"),
        ("        sampler.set_epoch(epoch)\n", "", "rows differ from those of the loop given"),
        ('checkpoint["epoch"], checkpoint["done"]', 'checkpoint["epoch"], 0', "repeats the epoch from its start"),
        ('"done": done', '"done": done - 1', "takes step 5 again"),
        (
            "        done = 0",
            '        done = checkpoint["done"] if checkpoint else 0',
            "after step 5 of 9, the first rows are right, and 2 steps follow instead of 4",
        ),
        ('"epoch": epoch', '"epoch": 0', "which epoch is it"),
        (", momentum=0.9", "", "optimizer and schedule should stay"),
        ("save({", "if done == 3: save({", "save was called 3 times for 9 steps"),
        ('"net": net.state_dict()', '"net": net', "not the objects themselves"),
        ("torch.get_rng_state()", "torch.Generator", "can't be loaded with weights_only=True"),
        ("range(first, 3)", "range(first, 3 if checkpoint is None else 0)", "takes no step"),
    ],
    "minutes": [
        (
            "interval + write <= failure",
            "interval <= failure",
            "70 minutes instead of 92: it dies in the middle of a save",
        ),
        ("failure + restart", "failure", "instead of 79: the save at 22 is whole"),
        ("return clock", "return clock - write", "64 minutes instead of 66: three times 20 minutes and a save"),
        ("return clock", "return f'{clock} minutes'", "str instead of a number"),
        ("return clock", "return clock + restart * len(failures[3:])", "minutes instead of"),
        ('[*failures, float("inf")]', '[*failures[:1], float("inf")]', "the restart begins anew"),
    ],
    # Long sequences and experts
    "rows_sent": [
        (
            """
    rows = chosen.flatten().bincount(minlength=sum(shares))
    return [part.sum().item() for part in rows.split(shares)]""",
            "sends it one row",
        ),
        ("sum(dim=0).tolist()", "sum(dim=0).tolist()[:-1]", "one number for each of the"),
        ("owner[chosen]", "owner.flip(0)[chosen]", "lower ranks the lower numbers"),
        ("owner[chosen]", "owner[chosen[:, :1]]", "shares[r] experts"),
    ],
    "within_capacity": [
        (
            "chosen.T.flatten()",
            "chosen.flatten()",
            "kept.view(chosen.T.shape).T",
            "kept.view(chosen.shape)",
            "All first",
        ),
        ("<= capacity", "< capacity", "of those that chose it would fit"),
        (" <= capacity", "", "return a tensor of bool"),
        ("<= capacity", "<= capacity + 1", "takes 3 rows"),
    ],
    "squared_part": [
        (
            "return sum(grad.square().sum() for grad in own.values())",
            "the router is counted 4 times, and each expert 2",
        ),
        ("ranks if name ==", "1 if name ==", "the router is counted"),
        ("else copies", "else 1", "each expert is counted 2 times"),
        ("else copies", "else ranks", "not all of them"),
        (
            'grad.square().sum() / (ranks if name == "router" else copies)',
            '(grad / (ranks if name == "router" else copies)).square().sum()',
            "not the gradient",
        ),
        ("grad.square().sum()", "grad.norm()", "each counted once, add up to"),
    ],
    # Plan a run on a thousand GPUs
    "tokens_to_hide": [
        (" / 8", "", "eight bits"),
        (" * mfu", "", "doesn't reach its peak"),
        ("cards * ", "", "all of them work"),
        ("4 / 3", "1", "8 FLOPs where MFU counts 6"),
        ("6 / 4", "1", "6 bytes hide behind 4 FLOPs"),
        ("6 / 4", "4 / 3", "6 FLOPs, 4 of them in the backward pass"),
        ("4 / 3", "5", "Divide the FLOP/s"),
    ],
    "gpus_to_rent": [
        (" if needed <= most else math.inf", "", "however many there are"),
        ("cards * ", "", "are in time. The batch has"),
        ("if needed <= most", "if 8 * math.ceil(needed / 8) <= most", "200 are in time"),
        ("8 * math.ceil(needed / 8)", "math.ceil(needed)", "nodes of eight"),
        ("8 * math.ceil(needed / 8)", "8 * math.floor(needed / 8)", "So many take 30 days"),
        ("8 * math.ceil(needed / 8)", "8 * math.ceil(needed / 8) + 8", "the fewest that are in time"),
        ("8 * math.ceil(needed / 8)", "needed", "Return a number of GPUs"),
    ],
    "straggler": [
        ("return max(range(len(waits[0])), key=lambda r: sum(step[r] for step in waits))", "was ready first"),
        ("return min(range(len(waits[0])), key=lambda r: sum(step[r] for step in waits))", "A single long pause"),
        ("2 * count > len(waits)", "count", "now and then"),
        ("2 * count > len(waits)", "2 * count > 2 * len(waits)", "the last to arrive waits least"),
        ("return 7", "the last to arrive"),
    ],
    "page": [
        ('"micro-batches": 1', '"micro-batches": 2', "and may have 2,097,152"),
        ('"GiB": 25.5', '"GiB": 64.6', "leave no room"),
        ('"GiB": 25.5', '"GiB": 3.0', "the planner counts 29"),
        ('"recomputed": True', '"recomputed": False', "the planner counts 270"),
        ('"tokens at a time": 32_768', '"tokens at a time": 30_000', "whole sequences"),
        ('"MFU": 0.41', '"MFU": 0.55', "the network allows"),
        ('"MFU": 0.41', '"MFU": 0.2', "is a bad plan"),
        ('32_768, "micro-batches": 1', '4096, "micro-batches": 8', '"GiB": 25.5', '"GiB": 8.6', "the network allows"),
        ("0.7 * tokens", "0.9 * tokens", "too bold"),
        ("0.7 * tokens, tokens", "0.7 * tokens, 2 * tokens", "can't be had"),
        ("(0.7 * tokens, tokens)", "tokens", "Give a range"),
        ("hours / 8_090", "hours / 50_000", "published rates"),
        ("5.0 * hours", "50 * hours", "for a GPU-hour"),
        ('"dollars": (2.0 * hours, 5.0 * hours)', "", "doesn't say: dollars"),
        ("return 13", "return a dictionary"),
    ],
    # The museum
    "clipped_step": [
        (REDUCE + CLIP, CLIP + REDUCE + "    for params in replicas:\n", "the step differs from a single device's"),
        ("        nn.utils.clip_grad_norm_(params, length)\n", "", "nothing was clipped"),
        ("nn.utils", "params is replicas[0] and nn.utils", "the replicas differ"),
        ("mgpu.sgd(params, lr, batch_size=1)", "torch.optim.SGD(params, lr).step()", "has a gradient"),
        ("nn.utils.clip_grad_norm_(params, length)", SCALED, "a gradient shorter than `length` was changed"),
    ],
    "own_bug": [
        (TWO_ONLY, REDUCE, "we find no bug"),
        ("in replicas:", "in replicas[:1]:", "but `assert_replicas_equal`, `assert_gradients_fresh`"),
        (TWO_ONLY, REDUCE + "    1 / (len(devices) == 2)\n", "it is not silent, but raises an error"),
        ("lr, batch", "0.9 * lr if len(devices) > 2 else 1.01 * lr, batch", "it is wrong, but"),
    ],
    "seed_of": [
        ("return seed + rank", "seed_of(0, 1, 0) and seed_of(0, 0, 0) are both 0: these two draw alike"),
        (
            "return (seed * 10**6 + step) * 1024 + rank",
            "seed_of(4, 194304, 0) is 4294967296: return a whole number from 0",
        ),
        (
            "return ((seed * 10**6 + step) * 1024 + rank) % 2**32",
            "seed_of(4, 194304, 0) and seed_of(0, 0, 0) are both 0",
        ),
        ("{step} {rank}", "{step}{rank}", "these two draw alike"),
        ("import random\nreturn random.getrandbits(32)", "a run could not be repeated"),
        ("return float(hash((seed, step, rank)))", "return a whole number"),
    ],
    "gather_backward": [
        ("step_matches_single_device", "replicas_equal", "replicas_equal passes. DDP gives all ranks the same mean"),
        ("step_matches_single_device", "assert_draws_differ", "draws_differ passes. nothing is drawn"),
        ("step_matches_single_device", "every_row_once", "every_row_once passes. Ask it on the ranks"),
        ("    dist.all_reduce(sums)\n", "", "rank 0 returns what the program returns"),
        (
            "sums = torch.stack(grads)",
            "sums = grads[dist.get_rank()]",
            ", sums[dist.get_rank()]",
            ", sums",
            "different rows",
        ),
        ("sums[dist.get_rank()]", "sums[dist.get_rank()] / dist.get_world_size()", "2 times too small"),
        ('return "step_matches_single_device", sums[dist.get_rank()]', "return sums[dist.get_rank()]", "two things"),
        ("    dist.all_reduce(sums)\n", "", ", sums[dist.get_rank()]", ", sums.sum(0)", "of different ranks"),
        ("sums[dist.get_rank()]", "sums[0]", "isn't the sum over all losses"),
        (", sums[dist.get_rank()]", ", sums", "of shape [2, 4, 3] instead of [4, 3]"),
        (", sums[dist.get_rank()]", ", 1.0", "float instead of a tensor"),
        ('"step_matches_single_device"', "1", "int instead of the name"),
    ],
}

RIGHT = {
    "balanced": [
        """
    shares, start = [[] for _ in range(ranks)], 0
    for length in lengths:
        for i in range(length // 2):
            shares[i % ranks] += [start + i, start + length - 1 - i]
        start += length
    return shares"""
    ],
    "rows_sent": [
        """
    ends = torch.tensor([0, *shares]).cumsum(0).tolist()
    return [((chosen >= a) & (chosen < b)).any(dim=1).sum() for a, b in zip(ends, ends[1:])]"""
    ],
    "gather_backward": [
        """
    mine = torch.empty_like(grads[0])
    dist.reduce_scatter(mine, list(grads))
    return "assert_step_matches_single_device", mine"""
    ],
    "ring_allreduce": ["from mgpu_lib.collectives import ring_allreduce"],
    "uneven_weights": ["return torch.tensor(sizes) / sum(sizes)"],
    "in_parallel": ["return nn.DataParallel(module, devices)(X)", "return mgpu.data_parallel(module, X, devices)"],
    "row_losses": [
        """
    H = torch.relu(self.hidden(X))
    loss = F.cross_entropy(self.out(H), y, reduction="none") + 0.1 * H.mean(dim=1)
    return loss.unsqueeze(1)"""
    ],
    "broadcast_backward": ["return sum(grad.to(device) for grad in grads if grad is not None)"],
    "sync_batch_norm": [
        (ONE_VAR, TWO_PASSES),
    ],
    "critical_batch": ["import mgpu_lib.evidence\nreturn mgpu_lib.evidence.critical_batch(steps)[0]"],
    "epoch_loss": [
        """
    losses = []
    for X, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X.to(device, non_blocking=True)), y.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()"""
    ],
    "rescale": [
        ("max(beta2**k, 0.9)", "max(1 - k * (1 - beta2), 0.9)"),
        """
    for group in optimizer.param_groups:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        half_life = 1 / k  # of the old one, in steps
        group.update(lr=lr * k**0.5, betas=(beta1, max(0.9, beta2 ** (1 / half_life))))
        group["weight_decay"] = k * lr * group["weight_decay"] / group["lr"]
        group.pop("initial_lr", None)""",
    ],
    "mended_script": [(f"data, {REPLICAS}", "data)")],
    "bucketed": [
        ("        flat /= dist.get_world_size()\n", "", "all_reduce(flat,", "all_reduce(flat, dist.ReduceOp.AVG,")
    ],
    "one_f_one_b": [("return order + [", "return (*order, *[", "in rest]", "in rest])")],
    "norm_tokens": [("F.rms_norm(X, weight.shape, f.apply(weight))", "F.rms_norm(X, weight.shape) * f.apply(weight)")],
    "on_gradient": [
        (
            "    mean = unit.reduce_scatter(whole)\n",
            "    mean = unit.reduce_scatter(whole)\n    if unit.shard.grad is not None:\n"
            "        mean = mean + unit.shard.grad\n    unit.shard.grad = mean\n    for p in unit.params:\n"
            "        p.grad = None\n    return\n",
        )
    ],
    "resumable": [  # random numbers that follow from the step need no place in the checkpoint
        (
            '        torch.set_rng_state(checkpoint["random"])\n',
            "",
            "            optimizer.zero_grad()",
            "            torch.manual_seed(1000 * epoch + done)\n            optimizer.zero_grad()",
        )
    ],
    "page": [
        """
    hours = 64 * 14 * 24
    return {"tokens at a time": 2 * 4096, "micro-batches": 1, "recomputed": True, "GiB": 12, "MFU": 0.4,
            "tokens": (2.5e11, 3.6e11), "interruptions": (0.4, 3), "dollars": (2.5 * hours, 4 * hours)}"""
    ],
}
