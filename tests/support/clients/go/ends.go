// Steps in which a connection ends in the middle of an operation.

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/go-sql-driver/mysql"
)

const (
	deadline = 20 * time.Second // the server must notice an event within this time
	sleep    = 60               // seconds that a query takes unless it is killed
)

// lock waits until no other session has the lock, and takes it. The server releases the lock when the session ends.
// If got is 0, lock does not wait, and checks that another session has the lock.
func (s session) lock(name string, got int64) error {
	return s.expect(got, fmt.Sprintf("select get_lock('%s', %d)", name, int64(deadline.Seconds())*got))
}

func (p plan) kill() (string, error) {
	victim, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer victim.close()
	killer, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer killer.close()
	number, err := victim.number("select connection_id()")
	if err != nil {
		return "", err
	}
	begun, gone := fmt.Sprintf("begun %d", number), fmt.Sprintf("gone %d", number)
	err = first(
		func() error { return victim.lock(begun, 1) },
		func() error { return victim.lock(gone, 1) },
	)
	if err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() {
		_, err := victim.number(fmt.Sprintf("select release_lock('%s') + sleep(%d)", begun, sleep))
		ended <- err
	}()
	err = first(
		func() error { return killer.lock(begun, 1) },
		func() error { return killer.exec(fmt.Sprintf("kill %d", number)) },
	)
	if err != nil {
		return "", err
	}
	var answer *mysql.MySQLError
	select {
	case err = <-ended:
	case <-time.After(deadline):
		return "", errors.New("the query goes on")
	}
	outcome := "connection lost"
	if errors.As(err, &answer) {
		outcome = fmt.Sprintf("error %d", answer.Number)
	} else if !errors.Is(err, mysql.ErrInvalidConn) {
		return "", fmt.Errorf("neither an answer nor a lost connection: %v", err)
	}
	return outcome, killer.lock(gone, 1)
}

func (p plan) cut() (string, error) {
	other, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer other.close()
	var socket net.Conn
	s, err := p.open(true, func(config *mysql.Config) {
		config.DialFunc = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			socket, err = new(net.Dialer).DialContext(ctx, network, address)
			return socket, err
		}
	})
	if err != nil {
		return "", err
	}
	defer s.close()
	number, err := s.number("select connection_id()")
	if err != nil {
		return "", err
	}
	gone := fmt.Sprintf("gone %d", number)
	if err := s.lock(gone, 1); err != nil {
		return "", err
	}
	found, err := s.QueryContext(context.Background(), "select n, repeat('x', 100) from numbers")
	if err != nil {
		return "", err
	}
	for i := 0; i < 1000; i++ {
		if !found.Next() {
			return "", fmt.Errorf("only %d rows: %v", i, found.Err())
		}
	}
	if err := other.lock(gone, 0); err != nil {
		return "", err
	}
	// If a context is canceled instead, the driver sometimes reads all remaining rows and keeps the connection.
	if err := socket.Close(); err != nil {
		return "", err
	}
	if err := other.lock(gone, 1); err != nil {
		return "", err
	}
	found.Close()
	fresh, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer fresh.close()
	return "", fresh.expect(1, "select 1")
}
