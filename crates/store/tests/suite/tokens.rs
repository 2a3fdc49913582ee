//! Sentences about tokens and the audit.

use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};

/// All of them, each on a store of its own.
pub async fn all<S: Access>(fresh: impl AsyncFn() -> S) {
    a_token_is_kept_until_it_is_revoked(&fresh().await).await;
    an_id_is_given_once(&fresh().await).await;
    a_key_is_for_one_body_until_it_expires(&fresh().await).await;
    tokens_are_not_kept_without_end(&fresh().await).await;
    logins_that_have_ended_make_room(&fresh().await).await;
    the_audit_is_read_backwards_page_by_page(&fresh().await).await;
    a_row_is_there_before_the_change_and_goes_with_what_was_not_made(&fresh().await).await;
    what_is_old_goes_batch_by_batch(&fresh().await).await;
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_790_000_000 + seconds).unwrap()
}

fn token(id: &str, scope: Scope) -> TokenRecord {
    TokenRecord {
        id: id.into(),
        hash: vec![7; 32],
        cookie_hash: None,
        scope,
        label: "for tests; drop table tokens".into(),
        created_at: at(0),
        expires_at: Some(at(100)),
        revoked_at: None,
    }
}

fn entry(seconds: i64) -> AuditEntry {
    AuditEntry {
        at: at(seconds),
        actor: "a1".into(),
        action: "pause".into(),
        target: format!("/api/v1/schedules/a/{seconds}/pause"),
        peer: "127.0.0.1".into(),
        status: Some(200),
    }
}

async fn a_token_is_kept_until_it_is_revoked(store: &impl Access) {
    assert!(store.tokens().await.unwrap().is_empty());
    let (b, a) = (token("b", Scope::Manage), TokenRecord { expires_at: None, ..token("a", Scope::Read) });
    assert_eq!(store.add_token(&b).await.unwrap(), AddedToken::Added);
    assert_eq!(store.add_token(&a).await.unwrap(), AddedToken::Added);
    assert_eq!(store.tokens().await.unwrap(), [a.clone(), b.clone()], "in order, and as they were");
    assert!(b.is_good(at(99)) && !b.is_good(at(100)) && a.is_good(at(1_000_000)));
    assert!(store.revoke_token(at(5), "b").await.unwrap());
    assert!(!store.revoke_token(at(6), "b").await.unwrap(), "once");
    assert!(!store.revoke_token(at(6), "nobody").await.unwrap());
    let revoked = TokenRecord { revoked_at: Some(at(5)), ..b };
    assert!(!revoked.is_good(at(6)));
    assert_eq!(store.tokens().await.unwrap(), [a, revoked]);
}

async fn logins_that_have_ended_make_room(store: &impl Access) {
    let login = |id: &str, created: i64, expires: i64| TokenRecord {
        cookie_hash: Some(vec![8; 32]),
        created_at: at(created),
        expires_at: Some(at(expires)),
        ..token(id, Scope::Admin)
    };
    for kept in
        [login("ends", 0, 50), login("revoked", 0, 500), login("stays", 0, 500), token("token", Scope::Read)]
    {
        assert_eq!(store.add_token(&kept).await.unwrap(), AddedToken::Added);
    }
    let ids = async || store.tokens().await.unwrap().into_iter().map(|token| token.id).collect::<Vec<_>>();
    assert!(store.revoke_token(at(10), "revoked").await.unwrap());
    assert!(store.revoke_token(at(10), "token").await.unwrap());
    assert_eq!(store.add_token(&login("early", 49, 500)).await.unwrap(), AddedToken::Added);
    assert_eq!(
        ids().await,
        ["early", "ends", "stays", "token"],
        "the revoked login is gone, the revoked token is not"
    );
    assert_eq!(store.add_token(&login("late", 50, 500)).await.unwrap(), AddedToken::Added);
    assert_eq!(ids().await, ["early", "late", "stays", "token"]);
    assert_eq!(store.tokens().await.unwrap()[2], login("stays", 0, 500), "as it was");
}

async fn an_id_is_given_once(store: &impl Access) {
    let first = token("x", Scope::Read);
    assert_eq!(store.add_token(&first).await.unwrap(), AddedToken::Added);
    let second = TokenRecord { hash: vec![8; 32], ..token("x", Scope::Admin) };
    assert_eq!(store.add_token(&second).await.unwrap(), AddedToken::Taken);
    assert_eq!(store.tokens().await.unwrap(), [first], "the first stays as it was");
}

async fn tokens_are_not_kept_without_end(store: &impl Access) {
    for n in 0..TOKENS_MAX {
        let added = store.add_token(&token(&format!("{n:04}"), Scope::Read)).await.unwrap();
        assert_eq!(added, AddedToken::Added);
    }
    assert_eq!(store.add_token(&token("more", Scope::Read)).await.unwrap(), AddedToken::Full);
    assert_eq!(store.add_token(&token("0000", Scope::Read)).await.unwrap(), AddedToken::Taken);
    assert_eq!(store.tokens().await.unwrap().len(), TOKENS_MAX);
}

async fn the_audit_is_read_backwards_page_by_page(store: &impl Access) {
    assert_eq!(store.audits(None, 10).await.unwrap(), Page { items: vec![], next: None });
    for second in 0..5 {
        store.begin_audit(&entry(second)).await.unwrap();
    }
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let page = store.audits(before, 2).await.unwrap();
        assert!(page.items.len() <= 2);
        seen.extend(page.items.into_iter().map(|(_, entry)| entry));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(seen, [4, 3, 2, 1, 0].map(entry));
}

async fn a_row_is_there_before_the_change_and_goes_with_what_was_not_made(store: &impl Access) {
    let open = |second| AuditEntry { status: None, ..entry(second) };
    let mut rows = Vec::new();
    for second in 0..3 {
        rows.push(store.begin_audit(&open(second)).await.unwrap());
    }
    assert!(rows.is_sorted_by(|one, other| one < other));
    store.end_audit(rows[0], Some(201)).await.unwrap();
    store.end_audit(rows[1], None).await.unwrap();
    store.end_audit(rows[1], Some(200)).await.unwrap();
    let left = store.audits(None, 10).await.unwrap().items;
    let made = AuditEntry { status: Some(201), ..entry(0) };
    assert_eq!(left, [(rows[2], open(2)), (rows[0], made)], "the last one is under way");
}

async fn what_is_old_goes_batch_by_batch(store: &impl Access) {
    for second in 0..5 {
        store.begin_audit(&entry(second)).await.unwrap();
    }
    store.add_token(&token("gone", Scope::Read)).await.unwrap();
    store.add_token(&TokenRecord { expires_at: None, ..token("stays", Scope::Read) }).await.unwrap();
    assert_eq!(store.prune_access(at(4), 3).await.unwrap(), 3, "a batch of the audit");
    assert_eq!(store.prune_access(at(4), 3).await.unwrap(), 1, "the rest of what is older");
    assert_eq!(store.prune_access(at(4), 3).await.unwrap(), 0, "and no more than that");
    let left = store.audits(None, 10).await.unwrap().items;
    assert_eq!(left.into_iter().map(|(_, entry)| entry).collect::<Vec<_>>(), [entry(4)]);
    let later = at(100) + SignedDuration::from_secs(1);
    assert_eq!(store.prune_access(later, 3).await.unwrap(), 2, "the last row, and a token that has expired");
    let left: Vec<_> = store.tokens().await.unwrap().into_iter().map(|token| token.id).collect();
    assert_eq!(left, ["stays"]);
}

async fn a_key_is_for_one_body_until_it_expires(store: &impl Access) {
    let key = |key: &str, body: u8| Key { key: key.into(), body_hash: vec![body; 32], expires_at: at(100) };
    assert!(store.use_key(at(0), &key("a", 1)).await.unwrap());
    assert!(store.use_key(at(1), &key("a", 1)).await.unwrap(), "a repeat");
    assert!(!store.use_key(at(1), &key("a", 2)).await.unwrap(), "another body");
    assert!(store.use_key(at(1), &key("b", 2)).await.unwrap(), "another key");
    assert!(store.use_key(at(100), &key("a", 2)).await.unwrap(), "it has expired");
}
