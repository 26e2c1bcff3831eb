"""The check of "Jobs that survive": typical wrong answers are explained, another right one taken."""

from answers import (  # noqa: F401
    changed,
    function,
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)

SIGNATURES = {"resumable": "net, X, y, sampler, checkpoint, save"}

RUN = """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    begin, skip = 0, 0
    if checkpoint is not None:
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["random"])
        begin, skip = checkpoint["epoch"], checkpoint["done"]
    for epoch in range(begin, 3):
        sampler.set_epoch(epoch)
        for done, rows in enumerate(torch.tensor(list(sampler)).split(4)):
            if epoch == begin and done < skip:
                continue
            optimizer.zero_grad()
            F.cross_entropy(net(X[rows]), y[rows]).backward()
            optimizer.step()
            scheduler.step()
            save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "done": done + 1,
                  "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()})"""


def wrong_runs(*changes):
    return [("resumable", changed(RUN, before, after), phrase) for before, after, phrase in changes]


WRONG = [
    *wrong_runs(
        ("if checkpoint is not None", "if False", "the run starts over"),
        ('begin, skip = checkpoint["epoch"], checkpoint["done"]', "begin, skip = 0, 0", "the run starts over"),
        ('        net.load_state_dict(checkpoint["net"])\n', "", "the parameters that it had"),
        ('        optimizer.load_state_dict(checkpoint["optimizer"])\n', "", "What does the optimizer remember"),
        ('        scheduler.load_state_dict(checkpoint["scheduler"])\n', "", "Which learning rate comes next"),
        ('        torch.set_rng_state(checkpoint["random"])\n', "", "dropout draws different random numbers"),
        ("        sampler.set_epoch(epoch)\n", "", "rows differ from those of the loop given"),
        ('checkpoint["epoch"], checkpoint["done"]', 'checkpoint["epoch"], 0', "repeats the epoch from its start"),
        ("done + 1", "done", "takes step 5 again"),
        ("epoch == begin and ", "", "after step 5 of 9, the first rows are right, and 2 steps follow instead of 4"),
        ('"epoch": epoch', '"epoch": 0', "which epoch is it"),
        (", momentum=0.9", "", "optimizer and schedule should stay"),
        ("save({", "if done == 2: save({", "save was called 3 times for 9 steps"),
        ('"net": net.state_dict()', '"net": net', "not the objects themselves"),
        ("torch.get_rng_state()", "torch.Generator", "can't be loaded with weights_only=True"),
        ("range(begin, 3)", "range(begin, 3 if checkpoint is None else 0)", "takes no step"),
    ),
]
RIGHT = [
    ("resumable", function("resumable", SIGNATURES["resumable"], RUN)),
    (  # random numbers that follow from the step need no place in the checkpoint
        "resumable",
        function(
            "resumable",
            SIGNATURES["resumable"],
            changed(
                changed(RUN, '        torch.set_rng_state(checkpoint["random"])\n', ""),
                "            optimizer.zero_grad()",
                "            torch.manual_seed(1000 * epoch + done)\n            optimizer.zero_grad()",
            ),
        ),
    ),
]
