package join

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// machine makes what a machine has that installs the unit, for the processes of one shell:
// the folders that are written to are others there, in memory, and systemctl notes what it
// is asked.
const machine = `
set -e
for d in /etc/systemd /var/lib /usr/local/bin /srv; do mount -t tmpfs tmpfs $d; done
mkdir /etc/systemd/system /srv/bin
cp "$PROGRAM" /usr/local/bin/tunnel
printf '#!/bin/sh\necho "$@" >> /srv/asked\n' > /srv/bin/systemctl
chmod 755 /srv/bin/systemctl /srv
export PATH=/srv/bin:/usr/local/bin:/usr/bin:/bin
set +e
`

// TestSystemd: the certificate goes where the unit may renew it, whether systemd was asked
// for at first or later, and stays there.
func TestSystemd(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("unshare", "--map-root-user", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("no namespace can be made here: %v: %s", err, out)
	}
	s := newSite(t, "127.0.0.1")
	s.start()
	_, first := s.create("edge1")
	_, second := s.create("edge2")
	secrets := first.Encode().Reveal()
	s.secret(secrets, first)
	s.secret(second.Encode().Reveal(), second)
	a := s.inMachine("FIRST=" + secrets + "\nSECOND=" + second.Encode().Reveal() + `
umask 077
echo '== join'; echo $FIRST | tunnel join --dir /srv/tunnel --systemd; echo "exit code $?"
cat /srv/asked
cat /etc/systemd/system/tunnel-edge.service | grep ExecStart=
stat -c '%a %n' /srv/tunnel /srv/tunnel/* /var/lib/tunnel-edge/*
grep nodecert /srv/tunnel/edge.toml

echo '== again, without'; echo $FIRST | tunnel join --dir /srv/tunnel; echo "exit code $?"
ls /srv/tunnel /var/lib/tunnel-edge

echo '== another node'; echo $SECOND | tunnel join --dir /srv/other --systemd; echo "exit code $?"

rm -r /var/lib/tunnel-edge
echo '== first without'; echo $SECOND | tunnel join --dir /srv/other >/dev/null; echo "exit code $?"
echo 'allow = ["10.0.0.0/8:443"]' > /srv/line && sed -i '/^node = /r /srv/line' /srv/other/edge.toml
echo '== then with'; echo $SECOND | tunnel join --dir /srv/other --systemd; echo "exit code $?"
ls /srv/other /var/lib/tunnel-edge; cat /srv/other/edge.toml

echo '== hidden'; echo $SECOND | "$PROGRAM" join --dir /srv/other --systemd; echo "exit code $?"
chmod 700 /srv/tunnel
echo '== closed'; echo $FIRST | tunnel join --dir /srv/tunnel --systemd --force; echo "exit code $?"
echo '== end'
`)
	parts := strings.Split(a.out, "== ")
	for part, wants := range map[string][]string{
		"join": {
			"ok    systemd", "exit code 0", "daemon-reload\nenable tunnel-edge\nrestart tunnel-edge\n",
			"ExecStart=/usr/local/bin/tunnel edge -c /srv/tunnel/edge.toml\n",
			"755 /srv/tunnel\n", "644 /srv/tunnel/ca.crt\n", "644 /srv/tunnel/edge.toml\n",
			"600 /var/lib/tunnel-edge/node.pem\n",
			`nodecert = "/var/lib/tunnel-edge/node.pem"`,
		},
		"again, without": {"exit code 0", "/var/lib/tunnel-edge/node.pem", "/srv/tunnel:\nca.crt\nedge.toml\n"},
		"another node":   {"exit code 1", "/var/lib/tunnel-edge/node.pem is of node edge1, and the token of node edge2"},
		"first without":  {"exit code 0"},
		"then with": {
			"exit code 0", "/srv/other:\nca.crt\nedge.toml\n", "/var/lib/tunnel-edge:\nnode.pem\n",
			`nodecert = "/var/lib/tunnel-edge/node.pem"`, `allow = ["10.0.0.0/8:443"]`,
		},
		// The program is in a temporary folder.
		"hidden": {"exit code 1", "FAIL  systemd: the unit does not see", "sudo install -m 755"},
		"closed": {"exit code 1", "may not enter /srv/tunnel", "chmod 755 /srv/tunnel"},
	} {
		found := false
		for _, text := range parts {
			rest, ok := strings.CutPrefix(text, part+"\n")
			if !ok {
				continue
			}
			found = true
			for _, want := range wants {
				if !strings.Contains(rest, want) {
					t.Errorf("%s:\n%s\nwant %q", part, rest, want)
				}
			}
		}
		if !found {
			t.Errorf("%s\nwant the part %q", a, part)
		}
	}
}

// inMachine types lines at a machine of their own.
func (s *site) inMachine(lines string) answer {
	s.t.Helper()
	a := s.command("PROGRAM="+filepath.Join(programs, "tunnel")+"\n"+machine+lines, "unshare",
		"--map-root-user", "--mount", "sh")
	s.spoken.WriteString(a.out + a.notes)
	return a
}
