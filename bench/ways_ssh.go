package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"strings"

	"tunnel.example/tunnel/internal/freeport"
	"tunnel.example/tunnel/test/rig"
)

// sshd is where Debian has it, which is not in everybody's path.
const sshd = "/usr/sbin/sshd"

// startSSH starts a sshd of our own and `ssh -R`. Neither reads the files of this machine.
func startSSH(b *bench, l *line) error {
	for _, program := range []string{sshd, "ssh", "ssh-keygen"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s is not there; Debian has it in openssh-server and openssh-client", program)
		}
	}
	me, err := user.Current()
	if err != nil {
		return err
	}
	if me.Uid == "0" {
		// A sshd that init starts finds it there.
		if err = os.MkdirAll("/run/sshd", 0o755); err != nil { // as Debian makes it
			return err
		}
	}
	dir, err := os.MkdirTemp(b.dir, "ssh-")
	if err != nil {
		return err
	}
	for _, key := range []string{"host", "client"} {
		if out, kerr := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
			dir+"/"+key).CombinedOutput(); kerr != nil {
			return fmt.Errorf("making a key: %w: %s", kerr, out)
		}
	}
	var door int
	for _, port := range []*int{&l.carrier, &door} {
		if *port, err = freeport.New(); err != nil {
			return err
		}
	}
	config := fmt.Sprintf(`ListenAddress %s
HostKey %s/host
AuthorizedKeysFile %[2]s/client.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
`, l.at.cloud.Address(l.carrier), dir)
	if err = os.WriteFile(dir+"/config", []byte(config), 0o600); err != nil {
		return err
	}
	ip, _, err := net.SplitHostPort(l.at.cloud.Address(l.carrier))
	if err != nil {
		return err
	}
	log := new(rig.Log)
	l.logs = log.String
	if l.cloud, err = l.run(l.at.cloud, log, sshd, "-D", "-e", "-f", dir+"/config"); err != nil {
		return err
	}
	if err = l.listening(); err != nil {
		return err
	}
	l.edge, err = l.run(l.at.edge, log, "ssh", "-N", "-F", "none", "-i", dir+"/client", "-p", fmt.Sprint(l.carrier),
		"-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
		"-o", "UserKnownHostsFile=/dev/null",
		"-o", "ExitOnForwardFailure=yes", "-R", fmt.Sprintf("127.0.0.1:%d:%s", door, l.target), me.Username+"@"+ip)
	l.dial = through(l.at.cloud.Network, loopback(door))
	return err
}

func sshVersion(*bench) string {
	out, err := exec.Command("ssh", "-V").CombinedOutput()
	if err != nil {
		return "unknown"
	}
	version, _, _ := strings.Cut(string(out), ",")
	return strings.TrimSpace(version)
}

// listening waits until the cloud listens for the edge.
func (l *line) listening() error {
	dial := through(l.at.cloud.Network, l.at.cloud.Address(l.carrier))
	return eventually(func() error {
		c, err := dial()
		if err == nil {
			c.Close()
		}
		return err
	})
}
