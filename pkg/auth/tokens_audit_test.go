package auth

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Each change of the token file is an event with the node that it is about, and no event has a token.
func TestTokenChanges(t *testing.T) {
	t.Parallel()
	one, two := NewToken(), NewToken()
	const plain = "correct-horse-battery-staple"
	parse := func(lines ...string) *table {
		tb, err := parseTokens("tokens", strings.Join(lines, "\n")+"\n", true, true)
		if err != nil {
			t.Fatal(err)
		}
		return tb
	}
	id := func(s Secret) string { return strings.TrimPrefix(s.Hashed(), "sha256:")[:8] }
	old := parse("edge1:"+one.Hashed(), "edge2:"+two.Hashed(), "edge3:"+plain, "edge5:revoked")
	now := parse("edge1:"+one.Hashed(), "edge1:"+two.Hashed()+" join expires=2026-11-22T10:00:00Z", "edge2:revoked",
		"edge4:revoked before=2026-11-21T09:30:00Z", "edge5:revoked", "default:"+plain)
	var got []string
	for _, e := range changes(old, now) {
		got = append(got, fmt.Sprintf("%s %s %s %s", e.Kind, e.Node, e.Token, e.By))
	}
	want := []string{
		"token edge1 " + id(two) + " a token to join until 2026-11-22T10:00:00Z",
		"revoke edge2  every proof",
		"token-gone edge2 " + id(two) + " a token for sessions",
		"token-gone edge3  a token for sessions",
		"revoke edge4  certificates from before 2026-11-21T09:30:00Z",
		"token   a token of any node",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	before := func(day string) string { return "edge1:revoked before=2026-11-" + day + "T09:30:00Z" }
	until := func(day string) string { return "edge1:" + one.Hashed() + " expires=2026-11-" + day + "T10:00:00Z" }
	for _, tt := range []struct {
		old, now string
		want     []string
	}{
		{"edge1:revoked", "edge1:" + plain, []string{"revoke-gone every proof", "token a token for sessions"}},
		{before("21"), before("20"), []string{
			"revoke-gone certificates from before 2026-11-21T09:30:00Z",
			"revoke certificates from before 2026-11-20T09:30:00Z"}},
		{before("21"), before("22"), []string{"revoke certificates from before 2026-11-22T09:30:00Z"}},
		{before("21"), "edge2:revoked", []string{
			"revoke-gone certificates from before 2026-11-21T09:30:00Z", "revoke every proof"}},
		{until("25"), until("26"), []string{
			"token a token for sessions until 2026-11-26T10:00:00Z",
			"token-gone a token for sessions until 2026-11-25T10:00:00Z"}},
	} {
		var got []string
		for _, e := range changes(parse(tt.old), parse(tt.now)) {
			got = append(got, string(e.Kind)+" "+e.By)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s → %s: %q, want %q", tt.old, tt.now, got, tt.want)
		}
	}
	if same := changes(now, now); len(same) != 0 {
		t.Errorf("nothing has changed, and there are %d events: %+v", len(same), same)
	}
	for _, e := range changes(&table{}, now) {
		if text := fmt.Sprintf("%+v", e); strings.Contains(text, plain) || strings.Contains(text, two.Reveal()) {
			t.Errorf("a token is in %s", text)
		}
	}
}
