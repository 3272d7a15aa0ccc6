"""`train.resume=auto`: one command for a job that is queued repeatedly."""

from contract_runs import make_run


def test_auto_begins_a_new_run_or_continues_an_existing_one(mode, tmp_path):
    first = make_run(tmp_path, mode, "train.resume=auto", resume=None)
    assert first.start_iter == 0
    first.train(until=3)
    first.checkpointer.save()
    again = make_run(tmp_path, mode, "train.resume=auto", resume=None)
    assert (again.start_iter, again.folder.run_id) == (3, first.folder.run_id)


def test_a_run_without_a_checkpoint_is_restarted(tmp_path):
    first = make_run(
        tmp_path, "eager", "train.resume=auto", "train.checkpointer.enabled=false", resume=None
    )
    first.train()
    again = make_run(tmp_path, "eager", "train.resume=auto", resume=None)
    assert again.start_iter == 0 and again.folder.run_id != first.folder.run_id
