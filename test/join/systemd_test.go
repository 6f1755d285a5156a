package join

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

// machine makes what a machine has that installs the unit, for the processes of one shell:
// the folders that are written to are others there, in memory, systemd seems to run the machine, and
// systemctl notes what it is asked. Every service runs.
const machine = `
set -e
for d in /etc/systemd /run /var/lib /usr/local/bin /srv; do mount -t tmpfs tmpfs $d; done
mkdir -p /etc/systemd/system /run/systemd/system /srv/bin
cp "$PROGRAM" /usr/local/bin/tunnel
printf '#!/bin/sh\necho "$@" >> /srv/asked\n[ $1 != is-active ] || echo active\n' > /srv/bin/systemctl
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
	const password = "canary-4712"
	s.secrets = append(s.secrets, password)
	proxy, _ := connectProxy(t, "me", password)
	a := s.inMachine("FIRST=" + secrets + "\nSECOND=" + second.Encode().Reveal() +
		"\nPROXY=http://me:" + password + "@" + proxy + `
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
echo $PROXY > /srv/url
echo '== first without'; echo $SECOND | tunnel join --dir /srv/other --proxy-file /srv/url; echo "exit code $?"
stat -c '%a %n' /srv/other/proxy
echo 'allow = ["10.0.0.0/8:443"]' > /srv/line && sed -i '/^node = /r /srv/line' /srv/other/edge.toml
echo '== then with'; echo $SECOND | tunnel join --dir /srv/other --systemd; echo "exit code $?"
ls /srv/other /var/lib/tunnel-edge; cat /srv/other/edge.toml
stat -c '%a %n' /var/lib/tunnel-edge/*; [ "$(cat /var/lib/tunnel-edge/proxy)" = "$PROXY" ] && echo "the same proxy"

echo '== the unit keeps its certificate'; echo $FIRST | tunnel join --dir /srv/other --force; echo "exit code $?"
grep nodecert /srv/other/edge.toml; stat -c '%a %n' /var/lib/tunnel-edge/node.pem; ls /srv/other

rm -r /var/lib/tunnel-edge
echo '== a secret of its own'; echo $SECOND | tunnel join --dir /srv/third >/dev/null; echo "exit code $?"
echo $PROXY > /srv/third/mine && sed -i '/^dns = /i proxyfile = "mine"' /srv/third/edge.toml
before=$(cat /srv/third/*)
echo $SECOND | tunnel join --dir /srv/third --systemd; echo "exit code $?"
[ "$before" = "$(cat /srv/third/*)" ] && echo "the files are as before"

echo '== force'; cp /srv/third/edge.toml /srv/edited
echo $SECOND | tunnel join --dir /srv/third --force; echo "exit code $?"
stat -c '%a %n' /srv/third/edge.toml.old; cmp /srv/edited /srv/third/edge.toml.old && echo "the old settings"
ls /srv/third
echo '== force again'; echo $SECOND | tunnel join --dir /srv/third --force; echo "exit code $?"
cmp /srv/edited /srv/third/edge.toml.old && echo "the old settings"

echo '== hidden'; echo $SECOND | "$PROGRAM" join --dir /srv/other --systemd; echo "exit code $?"
chmod 700 /srv/tunnel
echo '== closed'; echo $FIRST | tunnel join --dir /srv/tunnel --systemd --force; echo "exit code $?"
echo '== end'
`)
	wantParts(t, a, map[string][]string{
		"join": {
			"ok    systemd", "exit code 0", "daemon-reload\nenable tunnel-edge\nrestart tunnel-edge\n",
			"ExecStart=/usr/local/bin/tunnel edge -c /srv/tunnel/edge.toml\n",
			"755 /srv/tunnel\n", "644 /srv/tunnel/ca.crt\n", "644 /srv/tunnel/edge.toml\n",
			"600 /var/lib/tunnel-edge/cloud.json\n", "600 /var/lib/tunnel-edge/node.pem\n",
			`nodecert = "/var/lib/tunnel-edge/node.pem"`,
		},
		"again, without": {"exit code 0", "/var/lib/tunnel-edge/node.pem", "/srv/tunnel:\nca.crt\nedge.toml\n"},
		"another node":   {"exit code 1", "/var/lib/tunnel-edge/node.pem is of node edge1, and the token of node edge2"},
		"first without": {
			"exit code 0", "600 /srv/other/proxy\n",
			"with --systemd and without --proxy, --proxy-file and --proxy-ca.\n",
		},
		// The unit's user could not read /srv/other/proxy, which is root's and has a password.
		"then with": {
			"exit code 0", "/srv/other:\nca.crt\nedge.toml\n", "/var/lib/tunnel-edge:\ncloud.json\nnode.pem\nproxy\n",
			`nodecert = "/var/lib/tunnel-edge/node.pem"`, `allow = ["10.0.0.0/8:443"]`,
			`proxyfile = "/var/lib/tunnel-edge/proxy"`, "600 /var/lib/tunnel-edge/proxy\n", "the same proxy\n",
		},
		"the unit keeps its certificate": {
			"exit code 0", "systemctl restart tunnel-edge\n", `nodecert = "/var/lib/tunnel-edge/node.pem"`,
			"600 /var/lib/tunnel-edge/node.pem\n", "ca.crt\nedge.toml\nedge.toml.old\n",
		},
		"a secret of its own": {
			"exit code 0", "exit code 1", "/srv/third/mine has the mode 0600", "the token was not sent",
			"the files are as before",
		},
		"force": {
			"/srv/third/edge.toml (the file before is /srv/third/edge.toml.old", "exit code 0",
			"644 /srv/third/edge.toml.old\nthe old settings\n",
			"ca.crt\ncloud.json\nedge.toml\nedge.toml.old\nmine\nnode.pem\n",
		},
		"force again": {"edge.toml (as it was)", "exit code 0", "the old settings"},
		// The program is in a temporary folder.
		"hidden": {"exit code 1", "FAIL  systemd: the unit does not see", "sudo install -m 755"},
		"closed": {"exit code 1", "may not enter /srv/tunnel", "chmod 755 /srv/tunnel"},
	})
}

// TestSystemdCloud: what the unit's user has to read goes where that user may read it, whether systemd was
// asked for at first or later. A port below 1024 gets its capability.
func TestSystemdCloud(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("unshare", "--map-root-user", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("no namespace can be made here: %v: %s", err, out)
	}
	s := newSite(t, "127.0.0.1")
	a := s.inMachine(`
umask 077
unit=/etc/systemd/system/tunnel-cloud.service
echo '== init'; tunnel init --address cloud.example.com:9000 --dir /srv/cloud --systemd; echo "exit code $?"
cat /srv/asked; grep -e ExecStart= -e Capabilit $unit
stat -c '%a %n' /srv/cloud /srv/cloud/* /var/lib/tunnel-cloud/*
tunnel config check -c /srv/cloud/cloud.toml

echo '== token'; tunnel token create -c /srv/cloud/cloud.toml --node edge1 >/dev/null 2>&1; echo "exit code $?"
grep -c '^edge1:sha256:' /var/lib/tunnel-cloud/tokens

echo '== again'; cp -r /var/lib/tunnel-cloud /srv/before
tunnel init --address cloud.example.com:9000 --dir /srv/cloud --systemd; echo "exit code $?"
diff -r /srv/before /var/lib/tunnel-cloud && echo same

echo '== another cloud'; tunnel init --address other.example.com:9000 --dir /srv/other --systemd; echo "exit code $?"
ls -d /srv/other 2>&1

echo '== first without'; rm -r /var/lib/tunnel-cloud $unit
tunnel init --address cloud.example.com:443 --dir /srv/low >/dev/null; echo "exit code $?"
tunnel token create -c /srv/low/cloud.toml --node 'edge-*' --uses 1 >/dev/null 2>&1; echo "exit code $?"
sum=$(sed -n 's/.*sha256:\([0-9a-f]*\).*/\1/p' /srv/low/tokens)
echo "$sum edge-1 2026-01-02T03:04:05Z" > /srv/low/tokens.uses
tunnel token list -c /srv/low/cloud.toml
echo '== then with'; tunnel init --address cloud.example.com:443 --dir /srv/low --systemd; echo "exit code $?"
grep -e ExecStart= -e Capabilit $unit
ls /srv/low /var/lib/tunnel-cloud; tunnel config check -c /srv/low/cloud.toml
stat -c '%a %n' /var/lib/tunnel-cloud/*; tunnel token list -c /srv/low/cloud.toml
echo '== end'
`)
	wantParts(t, a, map[string][]string{
		"init": {
			"tunnel-cloud runs now", "exit code 0", "daemon-reload\nenable tunnel-cloud\nrestart tunnel-cloud\n",
			"ExecStart=/usr/local/bin/tunnel cloud -c /srv/cloud/cloud.toml\nCapabilityBoundingSet=\n755 /srv/cloud\n",
			"644 /srv/cloud/cloud.toml\n", "600 /srv/cloud/ca.key\n",
			"600 /var/lib/tunnel-cloud/cloud.key\n", "600 /var/lib/tunnel-cloud/nodes-ca.key\n",
			"600 /var/lib/tunnel-cloud/tokens\n", "/srv/cloud/cloud.toml: ok (cloud)",
		},
		"token":         {"exit code 0\n1\n"},
		"again":         {"exit code 0", "same\n"},
		"another cloud": {"exit code 1", "No such file"},
		"first without": {"exit code 0\nexit code 0\n", "used up"},
		"then with": {
			"exit code 0", "CapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n",
			"/srv/low:\nca.crt\nca.key\ncloud.crt\ncloud.toml\nnodes-ca.crt\n",
			"/var/lib/tunnel-cloud:\ncloud.key\nnodes-ca.key\ntokens\ntokens.uses\n", "/srv/low/cloud.toml: ok (cloud)",
			"600 /var/lib/tunnel-cloud/tokens.uses\n", "used up",
		},
	})
	if !strings.Contains(a.notes, "this machine has /var/lib/tunnel-cloud/cloud.key") {
		t.Errorf("%s\nwant what another cloud has", a)
	}
}

// TestSystemdPackage: with the unit of a package, the commands use that unit, and write a drop-in only for what is
// particular to this machine. A unit that hides the package's is set aside.
func TestSystemdPackage(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("unshare", "--map-root-user", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("no namespace can be made here: %v: %s", err, out)
	}
	units := "/usr/lib/systemd/system"
	if _, err := os.Stat(units); err != nil {
		t.Skipf("nothing can be mounted there: %v", err)
	}
	deployment, err := filepath.Abs("../../deployment/systemd")
	if err != nil {
		t.Fatal(err)
	}
	s := newSite(t, "127.0.0.1")
	s.start()
	_, token := s.create("edge1")
	word := token.Encode().Reveal()
	s.secret(word, token)
	a := s.inMachine("TOKEN=" + word + `
mount -t tmpfs tmpfs ` + units + `
# The package's program and its folder are elsewhere, since this machine may not write to /usr/bin and /etc.
for mode in cloud edge; do
	sed "s|^ExecStart=.*|ExecStart=/usr/local/bin/tunnel $mode -c /srv/$mode/$mode.toml|" \
		` + deployment + `/tunnel-$mode.service > ` + units + `/tunnel-$mode.service
done
umask 077
cd /etc/systemd/system
files() { echo "exit code $?, files:$(find . -type f -printf ' %P')."; }
echo '== join'; echo $TOKEN | tunnel join --dir /srv/edge --systemd; files; cat /srv/asked

echo '== elsewhere'; rm -r /srv/edge
echo $TOKEN | tunnel join --dir /srv/mine --systemd; files
stat -c '%a' tunnel-edge.service.d; cat tunnel-edge.service.d/*

echo '== hidden'; rm -r /srv/mine; echo mine > tunnel-edge.service
echo $TOKEN | tunnel join --dir /srv/edge --systemd; files; cat tunnel-edge.service.old

echo '== init'; rm -r *
tunnel init --address cloud.example.com:9000 --dir /srv/cloud --systemd; files

echo '== low'; rm -r /srv/cloud /var/lib/tunnel-cloud
tunnel init --address cloud.example.com:443 --dir /srv/cloud --systemd; files
grep -c ExecStart tunnel-cloud.service.d/*; grep Capabilit tunnel-cloud.service.d/*
echo '== end'
`)
	const edgeUnit, edgeDropIn = "/usr/lib/systemd/system/tunnel-edge.service", "tunnel-edge.service.d/50-tunnel.conf"
	const cloudUnit, cloudDropIn = "/usr/lib/systemd/system/tunnel-cloud.service", "tunnel-cloud.service.d/50-tunnel.conf"
	wantParts(t, a, map[string][]string{
		"join": {
			"ok    systemd the unit is the package's: " + edgeUnit + "\n",
			"exit code 0, files:.\ndaemon-reload\nenable tunnel-edge\nrestart tunnel-edge\n",
		},
		"elsewhere": {
			"the unit is the package's: " + edgeUnit + "\n", "/etc/systemd/system/" + edgeDropIn + "\n",
			"exit code 0, files: " + edgeDropIn + ".\n755\n",
			"[Service]\n", "\nExecStart=\nExecStart=/usr/local/bin/tunnel edge -c /srv/mine/edge.toml\n",
		},
		"hidden": {
			"tunnel-edge.service hid the package's unit, and is now /etc/systemd/system/tunnel-edge.service.old\n",
			"exit code 0, files: tunnel-edge.service.old.\nmine\n",
		},
		"init": {"the unit is the package's: " + cloudUnit + "\n", "exit code 0, files:.\n"},
		"low": {
			"the unit is the package's: " + cloudUnit + "\n", "exit code 0, files: " + cloudDropIn + ".\n0\n",
			"CapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n",
		},
	})
}

// TestNoSystemd: on a machine without systemd, --systemd fails first, leaves nothing behind, and says what
// to run. The token stays good.
func TestNoSystemd(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("unshare", "--map-root-user", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("no namespace can be made here: %v: %s", err, out)
	}
	s := newSite(t, "127.0.0.1")
	s.start()
	_, token := s.create("edge1")
	_, other := s.create("edge2")
	issued := strings.Count(s.log.String(), "certificate issued")
	word, otherWord := token.Encode().Reveal(), other.Encode().Reveal()
	s.secret(word, token)
	s.secret(otherWord, other)
	a := s.inMachine("TOKEN=" + word + " OTHER=" + otherWord + `
rmdir /run/systemd/system
echo '== join'; echo $TOKEN | tunnel join --systemd --dir /srv/edge; echo "exit code $?"
echo '== init'; tunnel init --address a.example.com:9000 --systemd --dir /srv/cloud 2>&1; echo "exit code $?"
echo '== left'; ls /srv /var/lib /etc/systemd/system
echo '== not root'; mkdir /run/systemd/system
echo $TOKEN | unshare --user tunnel join --systemd --dir /srv/edge; echo "exit code $?"
echo '== not root, after a join'; echo $OTHER | tunnel join --dir /srv/other >/dev/null 2>&1; echo "as root: $?"
before=$(sha256sum /srv/other/*)
echo $OTHER | unshare --user tunnel join --systemd --dir /srv/other; echo "exit code $?"
[ "$before" = "$(sha256sum /srv/other/*)" ] && echo "the files are as before"
echo '== end'
`)
	wantParts(t, a, map[string][]string{
		"join": {
			"exit code 1", "FAIL  systemd: systemd does not run this machine", "Nothing was written or sent.",
			"tunnel edge -c /srv/edge/edge.toml",
		},
		"init": {
			"exit code 1", "tunnel: systemd: systemd does not run this machine", "tunnel cloud -c /srv/cloud/cloud.toml",
		},
		"left":     {"/etc/systemd/system:\n\n/srv:\nbin\n\n/var/lib:\n"},
		"not root": {"exit code 1", "FAIL  systemd: only root may add a unit", "sudo"},
		"not root, after a join": {
			"as root: 0", "exit code 1", "FAIL  systemd: only root may add a unit", "the files are as before",
		},
	})
	if strings.Contains(a.out, "ok    ") {
		t.Errorf("%s\nwant that no step succeeds before systemd", a)
	}
	testkit.Eventually(t, "one certificate was made, for edge2", func() bool {
		return strings.Count(s.log.String(), "certificate issued") == issued+1
	})
	s.want(0, s.join(token, filepath.Join(t.TempDir(), "edge")))
}

// wantParts checks that each part of the output, which begins with "== " and its name, holds its texts.
func wantParts(t *testing.T, a answer, parts map[string][]string) {
	t.Helper()
	texts := strings.Split(a.out, "== ")
	for part, wants := range parts {
		found := false
		for _, text := range texts {
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
